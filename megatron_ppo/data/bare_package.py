"""Imports one module of a package without running the package's own `__init__`.

`reasoning_gym/__init__.py` imports all of its 106 data sets, hence seven packages that `chain_sum` does not
need, one of which is built with a C compiler. Invariant: afterwards `sys.modules` has no half-imported
package, so that a later ordinary import of it works.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

_lock = threading.Lock()


def import_module_only(module: str, *, install_hint: str) -> ModuleType:
    """The module `package.sub.module`, with `package` and `package.sub` as empty stand-ins meanwhile.

    A package that is imported already is used as it is.

    Raises: ModuleNotFoundError, ending in `install_hint`, if the package is not installed.
    """
    root = module.partition(".")[0]
    with _lock:
        if root in sys.modules:
            return importlib.import_module(module)
        spec = importlib.util.find_spec(root)
        if spec is None or not spec.submodule_search_locations:
            raise ModuleNotFoundError(f"package {root!r} is not installed; {install_hint}", name=root)
        with _stand_ins(module.split(".")[:-1], Path(spec.submodule_search_locations[0])):
            return importlib.import_module(module)


@contextlib.contextmanager
def _stand_ins(parts: list[str], root_folder: Path) -> Iterator[None]:
    before = set(sys.modules)
    for depth in range(len(parts)):
        name = ".".join(parts[: depth + 1])
        package = ModuleType(name)
        package.__path__ = [str(root_folder.joinpath(*parts[1 : depth + 1]))]
        sys.modules[name] = package
    try:
        yield
    finally:
        for name in set(sys.modules) - before:
            if name.partition(".")[0] == parts[0]:
                del sys.modules[name]
