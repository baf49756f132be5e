"""What operator, Jobs and workers agree on: names, hashes, documents, codes. Standard library only."""
