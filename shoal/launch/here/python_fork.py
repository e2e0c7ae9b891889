"""A new Python process as a fork of this one, which has loaded torch already.

Importing torch takes seconds, and a fork milliseconds. The fork behaves as `python SCRIPT ARGS`
and `python -m MODULE ARGS` do: it has its own session, environment, streams, path, arguments,
signal handlers and functions to call at exit; nothing of a script has run in it; and generators of
random numbers are in the state in which a new interpreter has them.

    has_use        whether a script would gain by it: it names torch, and leaves its environment
    load           torch, and what the script imports, as far as it is installed
    can_fork       not with a second thread, nor where a file of the script shadows a loaded module
    be_python      in the fork
"""

from __future__ import annotations

import ast
import atexit
import builtins
import gc
import importlib
import importlib.util
import io
import os
import runpy
import signal
import sys
import tempfile
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import BuiltinImporter, ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from shoal.errors import BadInput
from shoal.launch.losses.failures import add_line_of_script, report_failure
from shoal.runtime.config import RunConfig, replace_environment
from shoal.runtime.decoders import parse_module
from shoal.runtime.launched_worker import refuse_plain_training, seed_launched_worker
from shoal.runtime.lazy_dynamo import load_when_used

_TORCH = ("torch.distributed", "safetensors.torch", "shoal.worker.run")
_FIRST_STEP = ("torch.fx.experimental.symbolic_shapes",)  # what the first backward imports
_NOT_LOADED = ("shoal", "triton")  # they seed, or start processes
_NO_SOURCE = (".pyc", ".pyz", ".zip")
_TASKS = Path("/proc/self/task")
_fork_safe = 0  # threads that end before a fork: those of numpy's OpenBLAS, which sees to it
_GPUS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
_BESIDE_GPUS = {"torch", "numpy", *sys.stdlib_module_names}
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


class Fork:
    """What `Processes` uses of a Popen."""

    def __init__(self, pid: int, returncode: int | None = None):
        self.pid = pid
        self.returncode = returncode

    def poll(self) -> int | None:
        return self._reap(os.WNOHANG)

    def wait(self) -> int:
        return self._reap(0) or 0

    def _reap(self, flags: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, flags)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


def has_use(command: Sequence[str]) -> bool:
    """Whether the program can be read, uses torch, and sets no variables that torch may read."""
    source, tree = _source_of(command)
    return ("torch" in source or "shoal" in source) and not any(
        map(_sets_variables, ast.walk(tree))
    )


def _source_of(command: Sequence[str]) -> tuple[str, ast.Module]:
    """Of the script, module or text that is run; empty where there is none."""
    try:
        source = command[2] if command[1] == "-c" else _file_of(command).read_text()
        return source, parse_module(source)
    except (OSError, ValueError, SyntaxError, ImportError, IndexError):
        return "", ast.Module([], [])


def _file_of(command: Sequence[str]) -> Path:
    """Without importing the package of a module, which is for the worker to do."""
    if command[1] != "-m":
        return Path(command[1])
    top, *others = command[2].split(".")
    spec = importlib.util.find_spec(top)
    if spec is None or not others:
        return Path((spec and spec.origin) or "")
    file = Path((spec.submodule_search_locations or [""])[0], *others)
    return file / "__main__.py" if file.is_dir() else file.with_suffix(".py")


def _sets_variables(node: ast.AST) -> bool:
    """Whether this is `os.environ["…"] = …`, `os.environ.update(…)` or the like."""
    if isinstance(node, ast.Subscript):
        return not isinstance(node.ctx, ast.Load) and ast.unparse(node.value).endswith("environ")
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    on = ast.unparse(node.func.value)
    method = node.func.attr
    return method in ("putenv", "unsetenv") or (
        on.endswith("environ") and method in ("setdefault", "update", "pop", "clear")
    )


def load(command: Sequence[str]) -> bool:
    """Import torch and what the script names; whether this process may be forked then.

    A module that opens a device, a file or a socket, or starts a thread, leaves it in a state that
    forks cannot use.
    """
    global _fork_safe
    before = os.listdir("/proc/self/fd")
    importlib.import_module("numpy")
    _fork_safe = _threads()
    importlib.import_module("torch")
    load_when_used()
    for name in (*_TORCH, *_FIRST_STEP, *imports_of(command)):
        with suppress(Exception):  # the script will report it, if it needs the module
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what is loaded stays, and forks need not look through it
    return can_fork(command) and os.listdir("/proc/self/fd") == before


def imports_of(command: Sequence[str]) -> list[str]:
    """The installed modules that the program imports.

    Beside a GPU those of torch and of Python's library alone: others may look for it.
    """
    names: list[str] = []
    for node in ast.walk(_source_of(command)[1]):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    beside_gpu = any(Path(gpu).exists() for gpu in _GPUS)
    tops = {name.partition(".")[0] for name in names}
    taken = {top for top in tops if not beside_gpu or top in _BESIDE_GPUS}
    installed = {top for top in taken if _is_installed(top)}
    return [name for name in names if name.partition(".")[0] in installed]


def _is_installed(package: str) -> bool:
    """Of the library, or of packages; a script's own files stay its own."""
    if package in sys.stdlib_module_names:
        return True
    spec = importlib.util.find_spec(package)
    parts = Path((spec and spec.origin) or "").parts
    return package not in _NOT_LOADED and not {"site-packages", "dist-packages"}.isdisjoint(parts)


def can_fork(command: Sequence[str]) -> bool:
    """Whether a fork of this process would do what a new one does."""
    if command[1].endswith(_NO_SOURCE):
        return False
    return _threads() <= max(1, _fork_safe) and not _shadows(command)


def _threads() -> int:
    """Also those that are not Python's."""
    return len(list(_TASKS.iterdir())) if _TASKS.is_dir() else threading.active_count()


def _shadows(command: Sequence[str]) -> bool:
    """Whether the script's folder has a module of its own by the name of one that is loaded."""
    folder = Path.cwd() if command[1] == "-m" else Path(command[1]).resolve().parent
    names = {path.stem if path.suffix == ".py" else path.name for path in folder.iterdir()}
    for name in (names & set(sys.modules)) - {"__main__"}:
        file = getattr(sys.modules[name], "__file__", None)
        is_module = (folder / f"{name}.py").is_file() or (folder / name / "__init__.py").is_file()
        if is_module and file is not None and not Path(file).resolve().is_relative_to(folder):
            return True
    return False


def fork_function(body: Callable[..., None], *args: Any) -> Fork:
    """Call a function in a fork of an interactive session, which has one thread."""
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: see can_fork
        pid = os.fork()
    if pid:
        return Fork(pid)
    status = 1
    try:
        os.setsid()
        _forget_exit_functions()
        pools: Any = sys.modules.get("concurrent.futures.thread")
        if pools is not None:  # its threads, of which this may be one, are not to be joined here
            pools._threads_queues.clear()
        status = _exit_status(lambda: body(*args))
        _finish()
    except BaseException:
        traceback.print_exc()
    os._exit(status)


# ------------------------------------------------------------------ in the new process


def be_python(
    args: Sequence[str],
    env: Mapping[str, str],
    streams: Sequence[int],
    inherited: Sequence[int],
    before: Callable[[], None] = lambda: None,
) -> NoReturn:
    """In a fork: be `python ARGS`, with these standard streams.

    `before` is called before the program. The stack above is never returned to.
    """
    status = 1
    try:
        _become_new(env, streams, inherited)
        before()
        status = _exit_status(lambda: _run(args))
        _finish()
    except BaseException:
        traceback.print_exc()
    os._exit(status)


def _become_new(env: Mapping[str, str], streams: Sequence[int], inherited: Sequence[int]) -> None:
    for number, stream in enumerate([os.dup(stream) for stream in streams]):
        os.dup2(stream, number)
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in {0, 1, 2, *inherited}:
            with suppress(OSError):  # the descriptor of the listing
                os.close(int(name))
    before = replace_environment(env)
    tempfile.tempdir = None  # TMPDIR may be another one
    _open_streams("PYTHONUNBUFFERED" in env)
    _reset_signals()
    _forget_exit_functions()
    sys.excepthook = sys.__excepthook__
    torch: Any = sys.modules["torch"]
    threads, _, _ = env.get("OMP_NUM_THREADS", "").partition(",")
    has_read = all(env.get(name) == before.get(name) for name in _THREADS)  # when it was loaded
    # in any case, here: torch makes its pool again, and two threads of autograd may not both do so
    number = int(threads) if not has_read and threads.isdigit() else torch.get_num_threads()
    torch.set_num_threads(number)
    torch.default_generator.seed()  # by chance; `random` sees to it itself
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "shoal" in sys.modules:  # else this is a fork of a fork that has not imported it
        sys.meta_path.insert(0, _SeedWhenImported(sys.modules.pop("shoal")))
    refuse_plain_training()


class _SeedWhenImported(MetaPathFinder, Loader):
    """Finds shoal, which was loaded before the fork: `import shoal` acts as the first one does.

    That seeds the generators of a worker, and what a script draws before it does not follow from
    the seed. So the module was taken out, and the import puts the same one back.
    """

    def __init__(self, module: ModuleType):
        self._module = module
        self._spec = module.__spec__

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name == "shoal" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        sys.meta_path.remove(self)
        module.__spec__ = self._spec
        seed_launched_worker()


def _open_streams(unbuffered: bool) -> None:
    """Standard streams on descriptors 0 to 2, as the interpreter makes them."""
    sys.stdin = io.TextIOWrapper(open(0, "rb", closefd=False))  # noqa: SIM115
    for number, name, errors in ((1, "stdout", "strict"), (2, "stderr", "backslashreplace")):
        before = getattr(sys, f"__{name}__")
        encoding = "utf-8" if before is None else before.encoding
        errors = errors if before is None else before.errors
        raw = open(number, "wb", buffering=0 if unbuffered else -1, closefd=False)  # noqa: SIM115
        style: Any = {"line_buffering": number == 2, "write_through": unbuffered}
        stream = io.TextIOWrapper(raw, encoding=encoding, errors=errors, **style)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _reset_signals() -> None:
    """As exec does: handlers go, and what is ignored stays ignored."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _forget_exit_functions() -> None:
    """Those of the parent, such as the removal of its temporary folders."""
    atexit._clear()
    finalize: Any = weakref.finalize
    finalize._registry.clear()
    finalize._registered_with_atexit = False


def _exit_status(run: Callable[[], None]) -> int:
    """Run a program, and return what the interpreter makes of its end."""
    try:
        run()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt as error:
        _show(error)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException as error:
        return _show(error)
    return 0


def _is_reported(error: BaseException) -> bool:
    """Whether the launcher learns of it: it prints the failure of all workers once."""
    with suppress(BadInput, OSError):
        config = RunConfig.from_environment()
        if config.run_dir is not None and config.rank is not None:
            add_line_of_script(error)
            report_failure(config.run_dir, config.rank, error)
            return config.run_dir.failure(config.rank).exists()
    return False


def _show(error: BaseException) -> int:
    """Without the frames that a new interpreter would not have."""
    trace = error.__traceback__
    ours = (__file__, runpy.__file__, "<frozen runpy>")
    while trace is not None and trace.tb_frame.f_code.co_filename in ours:
        trace = trace.tb_next
    if _is_reported(error.with_traceback(trace)):
        return 1
    try:
        sys.excepthook(type(error), error.with_traceback(trace), trace)
    except SystemExit as end:  # the hook of launch/losses/failures.py
        return end.code if isinstance(end.code, int) else 1
    return 1


def _run(args: Sequence[str]) -> None:
    kind = args[0] if args[0] in ("-m", "-c") else ""
    sys.argv = [kind, *args[2:]] if kind == "-c" else list(args[1:] if kind else args)
    if not getattr(sys.flags, "safe_path", False):
        folder = str(Path(args[0]).resolve().parent)
        sys.path[0] = {"-m": os.getcwd(), "-c": ""}.get(kind, folder)
    if kind == "-m":
        sys.modules.pop(args[1], None)
        runpy.run_module(args[1], run_name="__main__", alter_sys=True)
        return
    main: Any = ModuleType("__main__")
    main.__builtins__ = builtins
    main.__annotations__ = {}
    sys.modules["__main__"] = main
    if kind == "-c":
        main.__loader__ = BuiltinImporter
        code = compile(args[1], "<string>", "exec")
    else:
        main.__file__ = os.path.abspath(args[0])
        main.__cached__ = None
        main.__loader__ = SourceFileLoader("__main__", main.__file__)
        code = compile(Path(args[0]).read_bytes(), main.__file__, "exec")
    exec(code, main.__dict__)


def _finish() -> None:
    """What the interpreter does at its end."""
    threads: Any = threading
    threads._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
