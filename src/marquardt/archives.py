"""Archives of torch.save, looked through before torch.load reads them: a file that comes from outside is data.

torch.load(weights_only=True) runs no code of a file either, but it unpacks what is compressed, calls `bytearray` and
`torch.Tensor` with any size, and takes whatever a program has registered by torch.serialization.add_safe_globals. Here
a file holds tensors and plain values, and none of them is larger than the file.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any, BinaryIO, ClassVar

import torch

# Values that a small file may have by holding some of them in several places
SHARED = 100_000


def read(file: BinaryIO) -> Any:
    """What is in it, on the CPU."""
    check(file)
    file.seek(0)
    return torch.load(file, map_location="cpu", weights_only=True)


def check(file: BinaryIO) -> None:
    """Raises if it is no archive of tensors and plain values, by an exception of any kind."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        names = {entry.filename.lower() for entry in entries}  # torch's reader takes capitals for small letters
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise ValueError("it is compressed")
        if len(names) < len(entries) or sum(entry.file_size for entry in entries) > size:
            raise ValueError("its entries overlap")
        root = entries[0].filename.partition("/")[0]
        pickled = io.BytesIO(archive.read(f"{root}/data.pkl"))
        content = Trial(pickled, lambda key: archive.getinfo(f"{root}/data/{key}").file_size).load()
        if written_out(content) > max(size, SHARED):
            raise ValueError("it holds the same lists in each other, more of them than it has bytes")


def written_out(content: Any) -> int:
    """How many values there are for who goes through all of them: what is held in several places counts in each"""
    counts: dict[int, int] = {}
    left = [(content, False)]
    while left:
        item, is_counted = left.pop()
        inner = [*item.values()] if isinstance(item, dict) else [*item] if isinstance(item, (list, tuple, set)) else []
        if is_counted:
            counts[id(item)] = 1 + sum(counts.get(id(part), 1) for part in inner)
        elif id(item) not in counts:
            counts[id(item)] = 1
            left += [(item, True), *((part, False) for part in inner)]
    return counts[id(content)]


class Standin:
    """In the place of any object: what is called, and what an object is built from, is kept and does nothing."""

    def __init__(self, *args: Any) -> None:
        self.args, self.state = args, None

    def __setstate__(self, state: Any) -> None:
        self.state = state


# The instructions of a pickle that torch.load knows as well. Others may ask for memory before they have read anything.
KNOWN = (
    pickle.PROTO + pickle.STOP + pickle.MARK + pickle.NONE + pickle.NEWTRUE + pickle.NEWFALSE + pickle.BININT
    + pickle.BININT1 + pickle.BININT2 + pickle.LONG1 + pickle.BINFLOAT + pickle.BINUNICODE + pickle.SHORT_BINSTRING
    + pickle.EMPTY_TUPLE + pickle.TUPLE + pickle.TUPLE1 + pickle.TUPLE2 + pickle.TUPLE3 + pickle.EMPTY_LIST
    + pickle.APPEND + pickle.APPENDS + pickle.EMPTY_DICT + pickle.SETITEM + pickle.SETITEMS + pickle.EMPTY_SET
    + pickle.BINGET + pickle.LONG_BINGET + pickle.BINPUT + pickle.LONG_BINPUT + pickle.GLOBAL + pickle.REDUCE
    + pickle.NEWOBJ + pickle.BUILD + pickle.BINPERSID
)  # fmt: skip


class Instructions(dict[int, Any]):
    def __missing__(self, code: int) -> Any:
        raise ValueError(f"it has the instruction {code}, which torch.load does not know")


class Trial(pickle._Unpickler):
    """Goes through a pickle as torch.load will, in Python, and builds no tensors."""

    stack: list[Any]
    dispatch: ClassVar[dict[int, Any]] = Instructions({code: pickle._Unpickler.dispatch[code] for code in KNOWN})

    def load_build(self) -> None:
        """The attributes that torch gives to a state_dict are of no use here."""
        self.stack.pop()
        if type(self.stack[-1]) is not OrderedDict:
            raise ValueError("it gives attributes to what is no state_dict")

    dispatch[pickle.BUILD[0]] = load_build

    def __init__(self, file: Any, size: Callable[[str], int]) -> None:
        super().__init__(file)
        self.size = size  # of an entry with numbers, in bytes

    def find_class(self, module: str, name: str) -> Any:
        path = f"{module}.{name}".replace("__builtin__.", "builtins.")
        if path in CALLED:
            return CALLED[path]
        found = getattr(torch, name, None) if module == "torch" else None
        if isinstance(found, (torch.dtype, torch.qscheme)):
            return found
        if module in ("torch", "torch.storage") and name.endswith("Storage"):
            return name  # of which nothing can be made by calling it
        raise ValueError(f"it holds {path}, which is neither a tensor nor a plain value")

    def persistent_load(self, pid: Any) -> tuple[int, int]:
        """Numbers in a storage, and bytes of each"""
        _, _, key, _, count = pid
        size = self.size(key)
        each = 1 if not count else size // count
        if each * count != size or each > 16:
            raise ValueError(f"it has {size} bytes for {count} numbers")
        return count, each


def tensor(storage: tuple[int, int], offset: int, size: tuple[int, ...], stride: tuple[int, ...], *more: Any) -> Any:
    """Whether it lies within its storage: not all versions of torch look."""
    count, each = storage
    dtypes = [item for item in more if isinstance(item, torch.dtype)]
    if each == 1 and dtypes:  # a storage without a type
        count //= dtypes[0].itemsize
    last = offset + sum((s - 1) * step for s, step in zip(size, stride, strict=True))
    if min((offset, *size, *stride)) < 0 or (0 not in size and last >= count) or math.prod(size) > count:
        raise ValueError(f"it has {count} numbers for a tensor of {tuple(size)}")
    return Standin()


def encoded(text: str, encoding: str) -> bytes:
    """How bytes are written in an old pickle"""
    if encoding != "latin1":
        raise ValueError(f"it has bytes in {encoding!r}")
    return text.encode("latin-1")


# What a pickle may call, and what is called in its stead.
CALLED: dict[str, Any] = {
    "torch._utils._rebuild_tensor_v2": tensor,
    "torch._utils._rebuild_tensor_v3": tensor,
    "torch._utils._rebuild_qtensor": tensor,
    "torch._utils._rebuild_parameter": Standin,
    "torch._utils._rebuild_sparse_tensor": Standin,
    "torch.serialization._get_layout": Standin,
    "torch.device": Standin,
    "torch.Size": tuple,
    "collections.OrderedDict": OrderedDict,
    "collections.Counter": Counter,
    "builtins.set": set,
    "builtins.complex": complex,
    "_codecs.encode": encoded,
}
