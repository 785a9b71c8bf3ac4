"""The `treadle` command: one module per subcommand, imported when it is the one that was called."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from io import TextIOWrapper
from typing import Any

# name: (module, one line of help). The order is that of `treadle --help`.
COMMANDS = {
    "demo": ("demo", "Train on the built-in stories for about a minute and write new ones."),
    "train": ("train", "Train a model on a text file, a directory of texts, or token files."),
    "generate": ("generate", "Write text with a trained model."),
    "eval": ("eval", "Take the loss of a trained model on a text or on token files."),
    "import": ("import_model", "Make a checkpoint of a model from elsewhere."),
    "export": ("export", "Write a model for other programs."),
    "info": ("info", "Say what a file or directory is, and whether it is intact."),
    "report": ("report", "Write a run's curves, samples and settings as one HTML page."),
    "plot": ("plot", "Draw the curves of runs as one picture."),
    "prepare": ("prepare", "Turn texts into tokens: clean, deduplicate, tokenise, split."),
    "tokenize": ("tokenize", "Show how a tokenizer splits a text."),
    "plan": ("plan", "Show memory, FLOPs, epochs and time of a run, before anything runs."),
    "profile": ("profile", "Time a training step op by op."),
    "devices": ("devices", "List what there is to compute on, and what would be chosen."),
    "check": ("check", "Check gradients and kernels on this machine."),
    "config": ("config", "Print the keys of a configuration, or its JSON schema."),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0, 2 for bad input, 1 for an internal error,
    130 after Ctrl-C. A traceback is shown only with --debug."""
    args = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in args
    args = [a for a in args if a != "--debug"]
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # text that an old terminal cannot show
    try:
        return _run(args)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 0
    except Exception as error:
        if debug:
            raise
        return _explain(error)


def _run(args: list[str]) -> int:
    import typer

    # Typer's errors of usage have no public name, and came from click in older versions.
    usage_error: Any = typer.BadParameter.__mro__[1]
    wanted = next((a for a in args if not a.startswith("-")), None)
    app = typer.Typer(
        name="treadle",
        help="Train small language models from scratch on the machine you have.",
        epilog="Every command explains itself with --help; --debug shows tracebacks.",
        add_completion=False,
        rich_markup_mode=None,
    )
    for name, (module, text) in COMMANDS.items():
        command = import_module(f"treadle.cli.{module}").command if name == wanted else _stub
        app.command(name, short_help=text)(command)

    @app.callback(invoke_without_command=True)
    def root(
        version: bool = typer.Option(False, "--version", help="Print the version and leave."),
    ) -> None:
        if version:
            from treadle import __version__

            print(f"treadle {__version__}")
            raise typer.Exit

    try:
        command_line = typer.main.get_command(app)
        code = command_line.main(args or ["--help"], "treadle", standalone_mode=False)
    except usage_error as error:
        context = getattr(error, "ctx", None)
        where = context.command_path if context else "treadle"
        message = " ".join(error.format_message().split())
        print(f"treadle: error: {message} (see {where} --help)", file=sys.stderr)
        return 2
    except typer.Abort:
        return 130
    return code if isinstance(code, int) else 0


def _stub() -> None:
    """Stands for the commands that were not called."""


def _explain(error: Exception) -> int:
    from treadle.errors import TreadleError

    if isinstance(error, TreadleError):
        line = " ".join(str(error).splitlines())  # names of files may have line ends in them
        print(f"treadle: error: {line}", file=sys.stderr)
        return error.exit_code
    if isinstance(error, OSError):  # of a file, a disk or a connection, and no fault of ours
        where = "" if error.filename is None else f"{error.filename}: "
        print(f"treadle: error: {where}{error.strerror or error}", file=sys.stderr)
        return TreadleError.exit_code
    text = " ".join(str(error).split())
    print(
        f"treadle: internal error: {type(error).__name__}: {text} (run again with --debug)",
        file=sys.stderr,
    )
    return 1
