"""The checkpoints of a run: which there are, which is newest, which is best, which may go."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from treadle.errors import CheckpointError, CorruptError
from treadle.files import json_file, leftover, one_line, write_atomic
from treadle.train.checkpoint import (
    STATE_NAME,
    check_sizes,
    discard,
    read_state,
    verify_checkpoint,
)

REGISTRY_NAME = "checkpoints.json"
CHECKPOINTS_DIR = "checkpoints"
Preference = Literal["best", "newest"]

_STEP_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Entry:
    """One checkpoint: losses in nats per token or None, `path` relative to the run directory,
    `digest` as `save_checkpoint` returned it, `time` of saving in UTC (ISO 8601)."""

    step: int
    train_loss: float | None
    val_loss: float | None
    path: str
    digest: str
    time: str


@dataclass(frozen=True)
class Found:
    """An intact checkpoint, and a note to print when it is not the one that was asked for."""

    path: Path
    entry: Entry
    note: str | None


@dataclass(frozen=True)
class Listed:
    """A checkpoint as a person looks at it: `size` in bytes, `time` of saving or None, whether it
    is the best or the latest of the intact ones, and what is wrong with it, or None."""

    step: int
    train_loss: float | None
    val_loss: float | None
    size: int
    time: datetime | None
    best: bool
    latest: bool
    fault: str | None


class Registry:
    """The checkpoints under `run_dir`/checkpoints.

    The directories are the truth: entries are read from their trainer_state.json files, and
    checkpoints.json is written from them for people and other programs, so that losing it or
    being killed before writing it loses nothing. Reading never writes: only the process that
    holds the run's lock calls `recover` and `add`.
    """

    def __init__(self, run_dir: str | os.PathLike[str]) -> None:
        self.run_dir = Path(run_dir)
        self.directory = self.run_dir / CHECKPOINTS_DIR
        self._scan()

    def path_for(self, step: int) -> Path:
        """Where the checkpoint of a step belongs."""
        return self.directory / f"step-{step:08d}"

    def _scan(self) -> None:
        self.entries: list[Entry] = []
        self.damaged: dict[int, str] = {}
        if not self.directory.is_dir():
            return
        for path in sorted(self.directory.iterdir()):
            name, role = leftover(path) or (path.name, None)
            match = _STEP_NAME.fullmatch(name)
            # One set aside for a replacement that never arrived is still the run's checkpoint.
            stands = role is None or (role == "old" and not (self.directory / name).exists())
            if match and stands and path.is_dir():
                try:
                    self.entries.append(self._entry(path, int(match[1])))
                except (CheckpointError, OSError) as error:
                    if path.is_dir():  # else a trainer has just pruned it
                        self.damaged[int(match[1])] = one_line(error)
        self.entries.sort(key=lambda entry: entry.step)

    def _entry(self, path: Path, step: int) -> Entry:
        document = read_state(path)
        check_sizes(path, document)
        state = document["state"]
        if state.get("step") != step:
            raise CorruptError(
                f"{path}: holds step {one_line(state.get('step'))}; it was renamed or mixed up"
            )
        saved = datetime.fromtimestamp((path / STATE_NAME).stat().st_mtime, UTC)
        return Entry(
            step=step,
            train_loss=_number(state.get("train_loss")),
            val_loss=_number(state.get("val_loss")),
            path=path.relative_to(self.run_dir).as_posix(),
            digest=document["digest"],
            time=saved.isoformat(timespec="seconds"),
        )

    # ------------------------------------------------------------------------------- reading

    def latest(self) -> Found | None:
        """The newest intact checkpoint, every file verified, or None when there are none at all.

        A damaged newer one is passed over and named in the note. Raises CorruptError when there
        are checkpoints and none is intact.
        """
        newest = self.entries[-1].step if self.entries else -1
        passed_over = [self.damaged[s] for s in sorted(self.damaged, reverse=True) if s > newest]
        return self._first_intact(self.entries[::-1], "newest", passed_over)

    def best(self) -> Found | None:
        """The intact checkpoint with the lowest validation loss, the earlier one of equals.

        Without any validation loss it is the newest. The optimizer's file is not looked at, as
        the best is for generating. None and errors as for `latest`.
        """
        return self._first_intact(_ranked(self.entries), "best", [])

    def _first_intact(
        self, candidates: list[Entry], wanted: Preference, reasons: list[str]
    ) -> Found | None:
        for entry in candidates:
            path = self.run_dir / entry.path
            try:
                verify_checkpoint(path, optimizer=wanted == "newest")
            except CheckpointError as error:
                reasons.append(str(error))
                continue
            note = None
            if reasons:
                note = f"the {wanted} checkpoint cannot be used ({reasons[0]}); using {path}"
            return Found(path, entry, note)
        reasons = reasons or list(self.damaged.values())
        if reasons:
            raise CorruptError(
                f"{self.directory}: no intact checkpoint ({reasons[0]}); restore one, or start "
                "another run with --out, with --init-from where weights are left"
            )
        return None

    def listed(self) -> list[Listed]:
        """All checkpoints by rising step, every file verified, the damaged ones with the reason."""
        faults = dict(self.damaged)
        for known in self.entries:
            try:
                verify_checkpoint(self.run_dir / known.path)
            except CheckpointError as error:
                if (self.run_dir / known.path).is_dir():  # else a trainer has just pruned it
                    faults[known.step] = str(error)
        intact = [known for known in self.entries if known.step not in faults]
        best, latest = _ranked(intact)[:1], intact[-1:]
        rows, by_step = [], {entry.step: entry for entry in self.entries}
        for step in sorted(by_step.keys() | faults.keys()):
            entry = by_step.get(step)
            path = self.path_for(step) if entry is None else self.run_dir / entry.path
            rows.append(
                Listed(
                    step=step,
                    train_loss=entry.train_loss if entry else None,
                    val_loss=entry.val_loss if entry else None,
                    size=_size(path),
                    time=datetime.fromisoformat(entry.time) if entry else None,
                    best=entry in best,
                    latest=entry in latest,
                    fault=faults.get(step),
                )
            )
        return rows

    # ------------------------------------------------------------------------------- writing

    def recover(self) -> None:
        """Clears what killed processes left, and writes checkpoints.json if it is not right.

        Unfinished saves and deletions are removed; a checkpoint that was set aside to be
        replaced goes back to its name if its replacement never arrived.
        """
        for parent in (self.run_dir, self.directory):
            for path in sorted(parent.iterdir()) if parent.is_dir() else ():
                named = leftover(path)
                if named is None:
                    continue
                name, role = named
                if role == "old" and not (parent / name).exists():
                    os.rename(path, parent / name)
                elif path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)
        self._scan()
        if self.entries or (self.run_dir / REGISTRY_NAME).exists():
            self._write(self._content(self.entries))

    def add(self, step: int, *, keep: int = 0, keep_every: int = 0) -> Entry:
        """Takes in the checkpoint that was saved at `path_for(step)`, then prunes.

        `keep` is how many of the newest stay, and with 0 all do; the best stays as well, and so do
        those whose step is a multiple of `keep_every`, where that is not 0. Directories that are
        damaged are neither counted nor deleted. Raises CheckpointError when the checkpoint cannot
        be read or checkpoints.json cannot be written.
        """
        self._scan()
        added = next((entry for entry in self.entries if entry.step == step), None)
        if added is None:
            reason = self.damaged.get(step, "no such checkpoint")
            raise CheckpointError(f"{self.path_for(step)} cannot be registered: {reason}")
        safe = {*self.entries[-keep:], *_ranked(self.entries)[:1]}
        safe |= {entry for entry in self.entries if keep_every and entry.step % keep_every == 0}
        doomed = [entry for entry in self.entries if entry not in safe]
        # The file first: a kill between the two leaves directories that the next `add` prunes.
        self._write(self._content([entry for entry in self.entries if entry in safe]))
        for entry in doomed:
            discard(self.run_dir / entry.path)
        self._scan()
        return added

    def _content(self, entries: list[Entry]) -> bytes:
        ranked = _ranked(entries)
        return json_file(
            {
                "best": ranked[0].path if ranked else None,
                "latest": entries[-1].path if entries else None,
                "checkpoints": [asdict(entry) for entry in entries],
            }
        )

    def _write(self, content: bytes) -> None:
        path = self.run_dir / REGISTRY_NAME
        try:
            if not path.is_file() or path.read_bytes() != content:
                write_atomic(path, content)
        except OSError as error:
            raise CheckpointError(
                f"cannot write {path}: {error.strerror or one_line(error)}; the checkpoints "
                "themselves are whole"
            ) from error


def _ranked(entries: list[Entry]) -> list[Entry]:
    """Entries from best to worst; those without a validation loss come last, newest first."""
    evaluated = [(e.val_loss, e.step, e) for e in entries if e.val_loss is not None]
    others = [e for e in entries if e.val_loss is None]
    return [entry for *_, entry in sorted(evaluated, key=lambda item: item[:2])] + others[::-1]


def _size(directory: Path) -> int:
    """Bytes of the files in a directory, as far as they are there."""
    total = 0
    for path in directory.iterdir() if directory.is_dir() else ():
        with contextlib.suppress(OSError):
            total += path.stat().st_size
    return total


def _number(value: Any) -> float | None:
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def find_checkpoint(path: str | os.PathLike[str], prefer: Preference) -> tuple[Path, str | None]:
    """The checkpoint that a person means by `path`, and a note to print or None.

    A run directory means its best or newest intact checkpoint; anything else is returned as it
    is, for `load_checkpoint` to judge. Raises CheckpointError for a run without checkpoints, a
    directory of runs, and a file that is no model.
    """
    source = Path(path)
    if not (source / CHECKPOINTS_DIR).is_dir():
        runs = sorted(str(found.parent) for found in source.glob(f"*/{CHECKPOINTS_DIR}"))
        if runs:
            raise CheckpointError(f"{source}: holds runs; name one of them: {', '.join(runs)}")
        if source.is_file() and source.suffix != ".safetensors":
            raise CheckpointError(
                f"{source}: is not a model; name a run, a checkpoint or a model.safetensors"
            )
        return source, None
    registry = Registry(source)
    found = registry.best() if prefer == "best" else registry.latest()
    if found is None:
        raise CheckpointError(f"{source}: this run has no checkpoint yet; train it first")
    return found.path, found.note
