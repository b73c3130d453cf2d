"""From `package.module:factory` or `path/file.py:factory` to a Workload."""

import importlib
import importlib.util
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType

from memwall.errors import MemwallError, UsageError
from memwall.patches import note_permanent
from memwall.trace.workload import Workload

_FORMS = "expected package.module:factory or path/file.py:factory, a function that returns a memwall.Workload"


def load_workload(spec: str) -> Workload:
    """Imports what `spec` names, calls it, and returns its Workload.

    The file's folder, or for a module the current one, stays on `sys.path`: factories import lazily.

    Raises:
        UsageError: the file or module is missing or fails, has no such factory, or the factory fails or returns
            something else than a Workload.
    """
    source, separator, name = spec.rpartition(":")
    if not separator or not source or not name:
        raise UsageError(f"'{spec}' names no factory; {_FORMS}")
    module = _load_file(spec, Path(source)) if source.endswith(".py") else _load_module(spec, source)
    if not hasattr(module, name):
        raise UsageError(f"'{spec}': {source} has no '{name}'{_functions_of(module)}")
    factory = getattr(module, name)
    if isinstance(factory, Workload):
        return factory
    if not callable(factory):
        raise UsageError(f"'{spec}': {name} is {type(factory).__name__}; {_FORMS}")
    try:
        workload = factory()
    except MemwallError:
        raise
    except Exception as error:
        raise UsageError(f"'{spec}': {name}() failed: {describe_error(error)}") from error
    if not isinstance(workload, Workload):
        raise UsageError(f"'{spec}': {name}() returned {type(workload).__name__}; expected a memwall.Workload")
    return workload


def _load_file(spec: str, path: Path) -> ModuleType:
    """Imports a file as a script's folder would allow it."""
    if not path.is_file():
        raise UsageError(f"'{spec}': there is no file {path}; {_FORMS}")
    _add_to_path(path.resolve().parent)
    # A name of its own, so that a file called like an installed package does not replace it.
    module_name = f"memwall_spec_{path.stem}"
    found = importlib.util.spec_from_file_location(module_name, path)
    if found is None or found.loader is None:
        raise UsageError(f"'{spec}': {path} cannot be imported as Python; {_FORMS}")
    module = importlib.util.module_from_spec(found)
    sys.modules[module_name] = module
    try:
        found.loader.exec_module(module)
    except Exception as error:
        del sys.modules[module_name]
        raise UsageError(f"'{spec}': importing {path} failed: {describe_error(error)}") from error
    return module


def _load_module(spec: str, source: str) -> ModuleType:
    """Imports a dotted name, from the current folder too, as `python -m` would."""
    _add_to_path(Path.cwd())
    try:
        return importlib.import_module(source)
    except ModuleNotFoundError as error:
        if error.name is not None and (source == error.name or source.startswith(f"{error.name}.")):
            raise UsageError(f"'{spec}': there is no module '{error.name}' in {Path.cwd()} or installed") from error
        raise UsageError(f"'{spec}': importing {source} failed: {describe_error(error)}") from error
    except Exception as error:
        raise UsageError(f"'{spec}': importing {source} failed: {describe_error(error)}") from error


def _add_to_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
        reason = "what a model is made by may import from there at any later moment"
        note_permanent("attribute", f"sys.path, {folder}", why="finds the modules of a factory", reason=reason)


def describe_error(error: Exception) -> str:
    """Returns its class, text and innermost line that is neither torch's nor ours: no traceback is shown."""
    folders = tuple(
        f"{Path(module.__file__).parent}{os.sep}"
        for name in ("torch", "memwall")
        if (module := sys.modules.get(name)) is not None and module.__file__ is not None
    )
    frames = traceback.extract_tb(error.__traceback__)
    outside = [frame for frame in frames if not frame.filename.startswith(folders)] if folders else frames
    where = next((f" ({frame.filename}, line {frame.lineno})" for frame in reversed(outside or frames)), "")
    return f"{type(error).__name__}: {error}{where}"


def _functions_of(module: ModuleType) -> str:
    """Returns the functions the module defines itself, to choose from."""
    names = sorted(
        name
        for name, value in vars(module).items()
        if callable(value) and not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    )
    return f"; it defines {', '.join(names)}" if names else "; it defines no function"
