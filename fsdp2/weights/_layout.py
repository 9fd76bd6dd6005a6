"""The layout of an inference engine's tensors, which the caller describes by boxes or rules.

Uses integers and names only. Independent of communication and load balancing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn

from fsdp2._core.base.errors import (
    ConfigError,
    check_count,
    check_flag,
    check_key,
    check_mapping,
    wrong_type,
    wrong_value,
)
from fsdp2._core.base.names import named_parameters
from fsdp2._core.base.rows import chunk_of

PLAN, RULES = "weights.plan", "weights.tensor_parallel"
MOST_RANKS = 1 << 12  # one layout is made for each
Shape = tuple[int, ...]


def ints_of(who: str, name: str, value: object) -> Shape:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise wrong_type(who, name, "a sequence of ints", value)
    return tuple(check_count(who, name, each, 0) for each in value)


@dataclass(frozen=True)
class Box:
    """A rectangular region of a full parameter of the trainer.

    Args:
        name: the parameter's name, without wrapper prefixes. With None, the box contains zeros (for
            example, the padding of a vocabulary).
        start: the first index in each dim of the parameter.
        shape: the number of elements in each dim of the parameter.
        transposed: the engine stores the box with its last two dims exchanged.
    """

    name: str | None
    start: Shape
    shape: Shape
    transposed: bool = False

    def __post_init__(self) -> None:
        if self.name is not None and not isinstance(self.name, str):
            raise wrong_type("Box", "name", "a str or None", self.name)
        object.__setattr__(self, "shape", ints_of("Box", "shape", self.shape))
        start = (0,) * len(self.shape) if self.name is None else self.start
        object.__setattr__(self, "start", ints_of("Box", "start", start))
        check_flag("Box", "transposed", self.transposed)
        if len(self.start) != len(self.shape) or (self.transposed and len(self.shape) < 2):
            expected = f"{len(self.shape)} ints, one per dim of shape (2 or more if transposed)"
            raise wrong_value("Box", "start", expected, self.start)

    @property
    def made(self) -> Shape:
        """The shape on the engine."""
        return turned(self.shape, self.transposed)


def turned(shape: Shape, transposed: bool) -> Shape:
    """Return a shape with its last two dims exchanged if ``transposed``."""
    return (*shape[:-2], shape[-1], shape[-2]) if transposed else shape


@dataclass(frozen=True)
class Spec:
    """A tensor of the engine: parts concatenated along a dim, in order.

    A part is a ``Box`` or a nested ``Spec`` (for example, of stacked experts with fused gates). A
    part may have fewer or more leading dims of size 1 than the tensor.

    Args:
        shape: shape of the tensor.
        dtype: dtype of the tensor and of all nested Specs.
        boxes: the parts.
        dim: the dim along which the parts are concatenated.
    """

    shape: Shape
    dtype: torch.dtype
    boxes: Sequence[Box | Spec] = field(default=())
    dim: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", ints_of("Spec", "shape", self.shape))
        if not isinstance(self.dtype, torch.dtype):
            raise wrong_type("Spec", "dtype", "a torch.dtype", self.dtype)
        for part in self.boxes if isinstance(self.boxes, Sequence) else [None]:
            if not isinstance(part, Box | Spec):
                raise wrong_type("Spec", "boxes", "a list of Box and Spec objects", self.boxes)
        object.__setattr__(self, "boxes", tuple(self.boxes))
        ndim = max(len(self.shape), 1)
        if check_count("Spec", "dim", self.dim, -ndim) >= ndim:
            raise wrong_value("Spec", "dim", f"a dim of {self.shape}", self.dim)
        object.__setattr__(self, "dim", self.dim % ndim)

    @property
    def made(self) -> Shape:
        return self.shape


Layout = Mapping[str, Spec]
"""The tensors of one engine rank, by name."""


def layouts_of(destination: object) -> list[Layout]:
    """Check a destination, and return its layouts."""
    if not isinstance(destination, list | tuple):
        raise wrong_type(PLAN, "destination", "a list of dicts, one per engine rank", destination)
    for layout in destination:
        for name, spec in check_mapping(PLAN, "each item of destination", layout).items():
            if not isinstance(spec, Spec):
                raise wrong_type(PLAN, f"destination[{name!r}]", "a Spec", spec)
    return list(destination)


def names_in(layouts: Iterable[Layout]) -> Iterator[str]:
    """Yield the names of the parameters that engine ranks need, with repetitions."""
    boxes = (box for layout in layouts for spec in layout.values() for box in boxes_of(spec))
    return (box.name for box in boxes if box.name is not None)


def boxes_of(part: Box | Spec) -> Iterator[Box]:
    if isinstance(part, Box):
        yield part
        return
    for inner in part.boxes:
        yield from boxes_of(inner)


# Layouts from rules.


@dataclass(frozen=True)
class Cut:
    """A rule for dividing a parameter over the ranks of an engine.

    Args:
        name: name of the trainer's parameter. ``*`` matches any text without a dot; ``#`` matches
            the number of an expert, and all experts are stacked.
        dim: the dim to split, as by ``torch.chunk``: 0 for column-parallel matrices, 1 for
            row-parallel matrices. None: every rank has the full parameter.
        heads: the number of heads in the dim, or the name of the config attribute with this number.
            Heads are not split. With fewer heads than ranks, neighbouring ranks share a head.
        pad: pad the rows with zeros to a multiple of this number (for vocabularies).
        parts: the number of matrices of equal size that are concatenated along the dim (such as
            gate and up in one parameter). Each rank gets a part of each matrix.
    """

    name: str
    dim: int | None = None
    heads: int | str = 0
    pad: int = 0
    parts: int = 1

    def __post_init__(self) -> None:
        check_key("Cut", "name", self.name)
        if not isinstance(self.heads, str):
            check_count("Cut", "heads", self.heads, 0)
        check_count("Cut", "pad", self.pad, 0)
        check_count("Cut", "parts", self.parts)


Rules = Mapping[str, "Cut | Sequence[Cut]"]
"""Maps engine tensors to a Cut, or to Cuts to fuse. Names in one rule have equally many ``*``."""


def tensor_parallel(
    model_or_config: object,
    size: int,
    rules: Rules,
    *,
    dtype: torch.dtype = torch.bfloat16,
    shapes: Mapping[str, Sequence[int]] | None = None,
) -> list[Layout]:
    """Return the layout of a tensor-parallel engine, for ``weights.plan``.

    For several replicas of the engine, repeat the list: ``tensor_parallel(...) * 2``.

    Args:
        model_or_config: a transformers config, or a model. The config, or the model's ``config``,
            must have the numbers of heads to which the rules refer.
        size: the number of ranks over which the tensors are divided, at most 4096.
        rules: mapping from the engine's tensor names to a ``Cut``, or to a list of Cuts to fuse.
        dtype: dtype of floating-point tensors on the engine.
        shapes: shapes of the parameters by name; None uses the model's shapes. If only a config is
            given, transformers builds the model on the meta device.

    Raises:
        ConfigError: a parameter matches no rule, or heads cannot be divided over the ranks.
    """
    if check_count(RULES, "size", size) > MOST_RANKS:
        raise wrong_value(RULES, "size", f"at most {MOST_RANKS} ranks", size)
    check_mapping(RULES, "rules", rules)
    cuts = {name: _cuts_of(name, rule) for name, rule in rules.items()}
    shapes = {} if shapes is None else check_mapping(RULES, "shapes", shapes)
    config = getattr(model_or_config, "config", model_or_config)
    given = shapes or _shapes_of(model_or_config)
    known = {name: ints_of(RULES, f"shapes[{name!r}]", shape) for name, shape in given.items()}
    found = [_Rank(known, config, size, index, dtype).layout(cuts) for index in range(size)]
    used = set(names_in(found))
    missing = [name for name in known if name not in used]
    if missing:
        raise ConfigError(
            "FS631",
            f"{RULES}: no rule matches {missing[0]} ({len(missing)} in total). Add a rule such as "
            f"{{{missing[0]!r}: weights.Cut({missing[0]!r})}} for a copy on every rank.",
        )
    return found


def _cuts_of(name: str, rule: object) -> Sequence[Cut]:
    cuts = [rule] if isinstance(rule, Cut) else rule
    if not isinstance(cuts, Sequence) or not cuts or not all(isinstance(c, Cut) for c in cuts):
        raise wrong_type(RULES, f"rules[{name!r}]", "a Cut or a non-empty list of Cuts", rule)
    return cuts


def _shapes_of(model_or_config: object) -> dict[str, Shape]:
    model: Any = model_or_config
    if not isinstance(model, nn.Module | type) and hasattr(model, "model_type"):
        import transformers  # type: ignore[import-not-found,unused-ignore]  # only for a config

        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(model_or_config)
    if not isinstance(model, nn.Module):
        expected = "an nn.Module or a transformers config"
        raise wrong_type(RULES, "model_or_config", expected, model_or_config)
    return {name: tuple(param.shape) for name, param in named_parameters(model).items()}


def _matches(pattern: str, names: Mapping[str, Any]) -> dict[tuple[str, ...], list[str]]:
    """Map the texts matched by ``*`` to the sorted numbers of the experts."""
    regex = re.escape(pattern).replace(r"\*", "([^.]+)").replace(r"\#", "(?P<expert>\\d+)")
    found: dict[tuple[str, ...], list[str]] = {}
    for match in filter(None, (re.fullmatch(regex, name) for name in names)):
        stars, place = list(match.groups()), match.re.groupindex.get("expert", 0)
        expert = stars.pop(place - 1) if place else ""
        found.setdefault(tuple(stars), []).append(expert)
    return {stars: sorted(experts, key=lambda e: int(e or 0)) for stars, experts in found.items()}


def _named(pattern: str, stars: Sequence[str], expert: str) -> str:
    """Return a name with its ``*`` and ``#`` filled in."""
    parts: Iterator[str] = iter(stars)
    return re.sub(r"\*", lambda _: next(parts), pattern).replace("#", expert)


@dataclass(frozen=True)
class _Rank:
    """One rank of the engine."""

    known: Mapping[str, Shape]
    config: object
    size: int
    index: int
    dtype: torch.dtype

    def layout(self, rules: Mapping[str, Sequence[Cut]]) -> Layout:
        """Return this rank's tensors: fused, and stacked if a name has ``#``."""
        found: dict[str, Spec] = {}
        for pattern, cuts in rules.items():
            for stars, experts in _matches(cuts[0].name, self.known).items():
                parts = []
                for expert in experts:
                    fused = [self._part(_named(cut.name, stars, expert), cut) for cut in cuts]
                    parts.append(fused[0] if len(fused) == 1 else self._joined(fused))
                stacked = Spec((len(parts), *parts[0].shape), self.dtype, parts)
                is_stacked = "#" in cuts[0].name
                found[_named(pattern, stars, "")] = stacked if is_stacked else parts[0]
        return found

    def _part(self, name: str, cut: Cut) -> Spec:
        """Return this rank's part of a parameter."""
        if name not in self.known:
            text = f"{RULES}: a rule names {name}, which the model does not have. Correct the rule."
            raise ConfigError("FS631", text)
        shape = self.known[name]
        if cut.dim is None:
            return Spec(shape, self.dtype, [Box(name, (0,) * len(shape), shape)])
        if cut.dim not in range(-len(shape), len(shape)):
            raise wrong_value("Cut", "dim", f"a dim of {name}, of shape {shape}", cut.dim)
        length, rest = divmod(shape[cut.dim], cut.parts)
        if rest:
            expected = f"a number that divides dim {cut.dim} of {name}, of shape {shape}"
            raise wrong_value("Cut", "parts", expected, cut.parts)
        first, count, padding = self._range(name, length, cut)
        boxes = []
        for part in range(cut.parts):
            start = _with((0,) * len(shape), cut.dim, part * length + first)
            boxes.append(Box(name, start, _with(shape, cut.dim, count)))
            if padding:
                boxes.append(Box(None, (), _with(shape, cut.dim, padding)))
        return self._joined(boxes, cut.dim)

    def _range(self, name: str, length: int, cut: Cut) -> tuple[int, int, int]:
        """Return this rank's first row, number of rows, and number of padding rows."""
        heads = cut.heads
        if isinstance(heads, str):
            found = getattr(self.config, heads, None)
            heads = check_count("Cut", f"heads ({heads!r} of the config)", found)
        if heads:
            if length % heads or (self.size > heads and self.size % heads):
                expected = f"a size compatible with {heads} heads of {name} ({length} rows)"
                raise wrong_value(RULES, "size", expected, self.size)
            first, count = self.index * heads // self.size, 1
            if self.size <= heads:
                first, count = chunk_of(heads, self.size, self.index)
            return first * (length // heads), count * (length // heads), 0
        if cut.pad:
            unit = math.lcm(cut.pad, self.size)
            rows = -(-length // unit) * unit // self.size
            first = min(self.index * rows, length)
            count = min(rows, length - first)
            return first, count, rows - count
        return *chunk_of(length, self.size, self.index), 0

    def _joined(self, parts: Sequence[Box | Spec], dim: int = 0) -> Spec:
        shape = parts[0].made
        shape = shape and _with(shape, dim, sum(part.made[dim] for part in parts))
        return Spec(shape, self.dtype, parts, dim)


def _with(shape: Shape, dim: int, size: int) -> Shape:
    """Return a shape with the size of one dim replaced."""
    return tuple(size if d == dim % len(shape) else old for d, old in enumerate(shape))
