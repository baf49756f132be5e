"""The front process of `trtmodel serve`: a worker's, which ends with the command that started it."""

from __future__ import annotations

from trtmodel_worker.front.main import main
from trtmodel_worker.lifetime import end_with_parent

if __name__ == "__main__":
    end_with_parent()
    main()
