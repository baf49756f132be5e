"""Completion: scripts for shells, and the words that could follow.

kubectl asks a program `kubectl_complete-trtmodel` in the same words (kubernetes.io/docs/tasks/extend-kubectl/
kubectl-plugins, "Writing kubectl plugins: shell completion"): one candidate a line, and a directive as the last line.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
from collections.abc import Iterable, Sequence

from trtmodel_operator.cli import dispatch, parser
from trtmodel_operator.cli.words import Failed

SCRIPTS = {
    "bash": """_trtmodel() {
  local words=("${COMP_WORDS[@]:1:COMP_CWORD}")
  local found
  found="$(trtmodel __complete "${words[@]}" 2>/dev/null | grep -v '^:')"
  COMPREPLY=()
  while IFS= read -r word; do [ -n "$word" ] && COMPREPLY+=("$word"); done <<< "$found"
}
complete -o default -F _trtmodel trtmodel
""",
    "zsh": """#compdef trtmodel
_trtmodel() {
  local -a found
  found=("${(@f)$(trtmodel __complete "${(@)words[2,CURRENT]}" 2>/dev/null | grep -v '^:')}")
  [[ -n "$found" ]] && compadd -a found || _files
}
compdef _trtmodel trtmodel
""",
    "fish": """function _trtmodel
  set -g _trtmodel_found (trtmodel __complete (commandline -opc)[2..] (commandline -ct) 2>/dev/null | grep -v '^:')
  test -n "$_trtmodel_found"
end
complete -c trtmodel -f -n _trtmodel -a '$_trtmodel_found'
""",
}
NO_FILES, FILES = ":4", ":0"  # of cobra's directives
NAMES_SECONDS = 3.0


def main(words: Sequence[str]) -> int:
    """`completion <shell>` or `__complete <words> <the word that is being written>`."""
    if words[0] == "completion":
        if len(words) != 2 or words[1] not in SCRIPTS:
            print(f"trtmodel completion {'|'.join(SCRIPTS)}", file=sys.stderr)
            return dispatch.EXIT_USAGE
        print(SCRIPTS[words[1]], end="")
        return 0
    found = candidates(list(words[1:-1]), words[-1] if len(words) > 1 else "")
    for word in found:
        print(word)
    print(NO_FILES if found else FILES)
    return 0


def kubectl() -> int:
    """Console entry of kubectl_complete-trtmodel."""
    return main(["__complete", *sys.argv[1:]])


def candidates(before: Sequence[str], word: str) -> list[str]:
    """What `word` could become after the words `before`."""
    if not before:
        return _starting(word, [*dispatch.CLUSTER, *dispatch.LOCAL, *dispatch.OTHERS])
    command = before[0]
    if command == "cache":
        return _starting(word, dispatch.CACHE) if len(before) == 1 else []
    if command == "completion":
        return _starting(word, SCRIPTS)
    if command not in dispatch.CLUSTER:
        return []
    options = _options(command)
    if word.startswith("-"):
        return _starting(word, options)
    asked = options.get(before[-1])
    if asked is not None and asked.nargs != 0:
        return _starting(word, asked.choices or ())
    if command == "lint":
        return []
    return _starting(word, _names(before))


def _starting(word: str, found: Iterable[str]) -> list[str]:
    return [name for name in found if name.startswith(word)]


def _options(command: str) -> dict[str, argparse.Action]:
    """By option of the command."""
    whole = parser.build("trtmodel")
    for action in whole._actions:  # argparse has no other way to ask
        if isinstance(action, argparse._SubParsersAction):
            one = action.choices[command]
            return {name: a for a in one._actions for name in a.option_strings}
    return {}


def _names(before: Sequence[str]) -> list[str]:
    """TRTModels of the namespace; none if the cluster does not answer."""
    given = dict(itertools.pairwise(before))
    with contextlib.suppress(Failed, ModuleNotFoundError, OSError):
        from trtmodel_operator.cli.connection import Connection

        at = Connection(
            given.get("--kubeconfig", ""), given.get("--context", ""), given.get("-n", given.get("--namespace", ""))
        )
        try:
            return [str(m["metadata"]["name"]) for m in at.models(seconds=NAMES_SECONDS)]
        finally:
            at.close()
    return []
