"""Checkpoints in shards: a folder in the format of torch's distributed checkpoint.

It has one file per learner, with its shards, and an index. ``meta.pt`` next to them is
an ordinary checkpoint without tensors. Lightning's `ModelParallelStrategy` reads the
folder without this package, and `export` turns it into one file. The learners of one
super-learner write the folder, because the consensus model is the same in all of them.

The folder gets its name once all files are on the disk, and replaces an older one
atomically. ``meta.pt`` holds the size and SHA-256 of every file.
"""

import ctypes
import hashlib
import itertools
import os
import pickle
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from enum import Enum
from functools import partial
from pathlib import Path, PurePath
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    Metadata,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
from typing_extensions import override

from lightning_adpsgd.coordination.gather import ending_together, gather_weights_only
from lightning_adpsgd.files import bytes_written_whole, sync_folder
from lightning_adpsgd.strategy.checkpoints.format import (
    DamagedCheckpoint,
    check_checkpoint,
    named,
    outline_of,
    read_checkpoint,
    refuse_unsafe,
    write_checkpoint,
)

META, INDEX = "meta.pt", ".metadata"
_FILES = "lightning_adpsgd/files"
"""The key of the size and SHA-256 of each file, by its name."""

_WEIGHTS, _NONE, _ASIDE = "state_dict.", slice(0), ".replaced"
_AT_WORKING_FOLDER, _EXCHANGE = -100, 2

_MODULES_OF_INDEX = (
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.filesystem",
)
_NAMES_OF_INDEX = (
    ("torch", "Size"),
    ("torch", "device"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
)


def write_shards(
    state: Mapping[str, Any], rest: dict[str, Any], path: Path, group: dist.ProcessGroup
) -> None:
    """Writes a checkpoint, whole or not at all; a collective over the group.

    Each learner holds shards of the tensors in `state`, nested dicts. The first one's
    `rest` is written. All of them must share the file system of `path`.

    Raises:
        OSError: The folder cannot be written; an earlier one is intact.
    """
    unfinished = path.with_name(f".{path.name}.unfinished")
    is_first = dist.get_rank(group) == 0
    together = partial(ending_together, f"checkpoint {path} was not written", group)
    with together():
        if is_first:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True, exist_ok=True)
    try:
        save(dict(state), storage_writer=_Writer(unfinished), process_group=group)
    except CheckpointException as error:
        raise named(_first_of(error), path) from error
    with together():
        own = _sums_of(unfinished.glob(f"__{dist.get_rank(group)}_*.distcp"))
    all_sums = gather_weights_only(own, group)
    with together():
        if all_sums is not None:
            _finish(unfinished, rest, all_sums)
            _put_in_place(unfinished, path)


def _finish(
    unfinished: Path, rest: dict[str, Any], all_sums: Iterable[Mapping[str, Any]]
) -> None:
    sums = _sums_of([unfinished / INDEX])
    for one in all_sums:
        sums.update(one)
    with bytes_written_whole(unfinished / META) as file:
        write_checkpoint({**rest, _FILES: sums}, file)


def read_rest(
    path: Path, weights_only: bool = True, share: slice = _NONE
) -> dict[str, Any]:
    """The plain data of a checkpoint that `check_folder` finds intact.

    Raises:
        DamagedCheckpoint: A file is missing, or is not as it was written.
        UnpicklingError: There are objects that can run code, and they are refused.
    """
    check_folder(path, share)
    with _opened(path / META) as file:
        rest = read_checkpoint(file, str(path / META), "cpu", weights_only)
    rest.pop(_FILES, None)
    return rest


def has_optimizer(path: Path, number: int) -> bool:
    """Whether a checkpoint holds the state of the optimizer with this number."""
    names = _Reader(path).read_metadata().state_dict_metadata
    return any(name.startswith(f"optimizer_{number}.") for name in names)


def export(folder: Path, file: Path, weights_only: bool = True) -> None:
    """Writes the weights and plain data of a checkpoint into one file for Lightning.

    Args:
        weights_only: whether to refuse objects that can run code.

    Raises:
        DamagedCheckpoint: A file is missing, or is not as it was written.
        FileExistsError: The file exists already.
        OSError: There is no folder of shards.
        UnpicklingError: There are objects that can run code, and they are refused.
    """
    if os.path.lexists(file):
        raise FileExistsError(f"`--out` must not exist yet, got {file}")
    _check_is_checkpoint(folder)
    rest = read_rest(folder, weights_only, slice(None))
    index, state = _Reader(folder).read_metadata(), {"state_dict": {}}
    for name, kept in index.state_dict_metadata.items():
        if name.startswith(_WEIGHTS):
            set_element(state, index.planner_data[name], _room_for(kept))
    read_shards(state, folder, weights_only=weights_only)
    with bytes_written_whole(file) as whole:
        write_checkpoint({**rest, **state}, whole)


def _room_for(kept: object) -> Tensor | None:
    """A tensor to read into; None for other values, as a module's extra state has."""
    if not isinstance(kept, TensorStorageMetadata):
        return None
    return torch.empty(kept.size, dtype=kept.properties.dtype, device="cpu")


def _check_is_checkpoint(folder: Path) -> None:
    if folder.is_file():
        raise NotADirectoryError(
            f"{folder} is a file already: `export` makes one of a folder of shards"
        )
    if not any((folder / name).exists() for name in (META, INDEX)):
        raise FileNotFoundError(
            f"there is no checkpoint at {folder}: it must be a folder with {META} and "
            f"{INDEX}"
        )


def read_shards(
    state: dict[str, Any], path: Path, strict: bool = True, weights_only: bool = True
) -> None:
    """Reads a learner's shards into tensors, which may be cut differently than saved.

    If `strict`, the checkpoint must have every tensor of `state`, nested dicts.

    Raises:
        DamagedCheckpoint: One of the files cannot be read.
        RuntimeError: A tensor is missing, or has a different shape.
        UnpicklingError: There are values that can run code, and they are refused.
    """
    kind = _Planner if weights_only else DefaultLoadPlanner
    planner, reader = kind(allow_partial_load=not strict), _Reader(path)
    reader.read_metadata()  # whose error torch would hide
    try:
        # Learners cut tensors differently, and so each reads by itself. In torch 2.6
        # the public `load` cannot.
        _load_state_dict(state, storage_reader=reader, planner=planner, no_dist=True)
    except CheckpointException as error:
        first = _first_of(error)
        if isinstance(first, pickle.UnpicklingError):
            raise pickle.UnpicklingError(f"checkpoint {path}: {first}") from error
        if isinstance(first, OSError | EOFError):
            _refuse(path, str(first))
        raise RuntimeError(f"checkpoint {path} does not fit the model: {first}") from (
            error
        )


def check_folder(path: Path, share: slice = _NONE) -> None:
    """Compares the sizes of all files, and the checksums of all but the shards.

    Of all files in the order of their names, a `share` has its checksums compared, too.
    Runs no code of the checkpoint. Folders of Lightning's have neither sizes nor sums.

    Raises:
        DamagedCheckpoint: A file is missing, or is not as it was written.
    """
    with _opened(path / META) as file:
        check_checkpoint(file, str(path / META))
        written = outline_of(file).get(_FILES, {})
    for name in {INDEX, *written}:
        if not (path / name).is_file():
            _refuse(path, f"{name} is missing")
    for name, (size, _) in written.items():
        if (found := (path / name).stat().st_size) != size:
            _refuse(path, f"{name} has {found} bytes and had {size}")
    for name in {INDEX, *sorted(written)[share]} & written.keys():
        if sum_of(path / name) != written[name][1]:
            _refuse(path, f"the SHA-256 of {name} is another than when it was written")


class _Writer(FileSystemWriter):
    """Raises the disk's own error, which torch replaces by one of its archive."""

    @override
    def write_data(self, *arguments: Any, **options: Any) -> Any:
        try:
            return super().write_data(*arguments, **options)
        except Exception as error:
            # Other learners see the error without its cause.
            raise _of_disk(error) from error


def _of_disk(error: BaseException) -> BaseException:
    found: BaseException | None = error
    while found is not None and not isinstance(found, OSError):
        found = found.__cause__ or found.__context__
    return found or error


class _Planner(DefaultLoadPlanner):
    """Refuses values that can run code, which torch's own planner would run."""

    @override
    def load_bytes(self, read_item: Any, value: Any) -> None:
        try:
            torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            refuse_unsafe(value, read_item.dest_index.fqn, error)
            raise
        value.seek(0)
        super().load_bytes(read_item, value)


class _Reader(FileSystemReader):
    """Refuses an index that can run code, which torch's own reader would run."""

    @override
    def read_metadata(self, *arguments: Any, **options: Any) -> Metadata:
        with _opened(Path(self.path) / INDEX) as file:
            try:
                metadata = _Index(file).load()
                if not isinstance(metadata, Metadata):
                    raise TypeError(f"it holds a {type(metadata).__name__}")
            except Exception as error:  # a malformed index may raise anything
                _refuse(Path(self.path), f"{INDEX} cannot be read: {error}")
        # torch's own reader does the same.
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Index(pickle.Unpickler):
    """Unpickles only the names that an index needs, none of which can run code."""

    @override
    def find_class(self, module: str, name: str, /) -> Any:
        if module.partition(".")[0] == "pathlib":
            # Python 3.13 names another module for the path that was written to.
            return PurePath
        is_dtype = module == "torch" and isinstance(
            getattr(torch, name, None), torch.dtype
        )
        if is_dtype or (module, name) in _NAMES_OF_INDEX:
            return super().find_class(module, name)
        if module in _MODULES_OF_INDEX:
            found = super().find_class(module, name)
            if _is_record(found) and found.__module__ == module:
                return found
        raise pickle.UnpicklingError(f"it holds a {module}.{name}, which can run code")


def _is_record(found: Any) -> bool:
    # The modules also have classes and functions that act, or import anything.
    is_class = isinstance(found, type)
    return is_class and (is_dataclass(found) or issubclass(found, Enum))


def _first_of(error: CheckpointException) -> BaseException:
    """What failed in the first of the learners that failed."""
    return next(cause for cause, _ in error.failures.values())


def _opened(path: Path) -> Any:
    try:
        return path.open("rb")
    except FileNotFoundError:
        _refuse(path.parent, f"{path.name} is missing")


def _sums_of(files: Iterable[Path]) -> dict[str, Any]:
    return {path.name: [path.stat().st_size, sum_of(path)] for path in files}


def sum_of(path: Path) -> str:
    """The SHA-256 of a file; that of ``meta.pt`` tells one save from all others."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _refuse(path: Path, what: str) -> NoReturn:
    raise DamagedCheckpoint.of(path, f"is damaged: {what}")


def _put_in_place(folder: Path, path: Path) -> None:
    """Gives a folder its name, and removes what had the name before."""
    before = path.with_name(f".{path.name}{_ASIDE}")
    if not os.path.lexists(path):
        os.rename(folder, path)
    elif _exchange(folder, path):
        before = folder
    else:
        # If the system cannot exchange names, the folder is missing for a moment.
        before = _free_name(path)
        os.rename(path, before)
        os.rename(folder, path)
    sync_folder(path.parent)
    _remove(before)


def left_aside(folder: str, begin: str) -> Iterator[Path]:
    """Checkpoints that a save has put aside and, as it was killed, not replaced.

    Args:
        begin: what their names of before begin with.
    """
    for path in Path(folder).glob(f".{begin}*{_ASIDE}*"):
        name = path.name[1:].rpartition(_ASIDE)[0]
        if not os.path.lexists(path.with_name(name)):
            rank_zero_warn(
                f"{path} counts as {name}: a save that was killed has put it aside, "
                "and nothing is in its place"
            )
            yield path


def _free_name(path: Path) -> Path:
    """A name for the folder that is replaced; removes what earlier saves have left."""

    def is_free(name: Path) -> bool:
        _remove(name)
        return not os.path.lexists(name)

    names = (f".{path.name}{_ASIDE}{number or ''}" for number in itertools.count())
    return next(filter(is_free, map(path.with_name, names)))


def _exchange(one: Path, other: Path) -> bool:
    """Exchanges two names atomically, if the system can."""
    try:
        rename = ctypes.CDLL(None).renameat2
    except (AttributeError, OSError):
        return False
    here, paths = _AT_WORKING_FOLDER, (os.fsencode(one), os.fsencode(other))
    return rename(here, paths[0], here, paths[1], _EXCHANGE) == 0


def _remove(path: Path) -> None:
    """Removes what there is; the next save removes what cannot be removed now."""
    if path.is_dir() and not path.is_symlink():
        # A network file system refuses while somebody reads an old shard.
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
