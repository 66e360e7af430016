"""The table of the mask algebra: one row per kind of node.

Everything that depends on the kind of a node is a column, and no column has a default. Checks, the dense predicate,
lowering, structure and text walk an expression and look up each node here. The docstrings of the constructors define
the masks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from . import heads, layouts, lengths, packing, positions, selection, trees
from .algebra import Mask
from .arguments import Sizes, batch_of, by_batch
from .context import Context
from .scene import Bools, Scene
from .terms import Terms


class Kind(NamedTuple):
    """One kind of node.

    name: `Mask.kind` of the nodes.
    constructor: the public function that makes them; `parse` accepts its parameters.
    leaves: names of their leaves.
    shapes: raises ValueError unless the arrays fit (B, Tq, Tk, Hq), without reading them; None if any arguments fit.
    contents: raises ValueError unless the leaves' contents fit (Tq, Tk); None if any contents do.
    predicate: the pairs that a node allows, bool [1|B, 1|Hq, 1|Tq, 1|Tk], directly from the definition.
    lowering: the terms of a node.
    text: the arguments as text; its argument is a function that writes a leaf or a child.
    sizes: (B, Tq, Tk) that the leaves determine, None for each unknown size; None if they never determine one.
    booleans: whether arrays are compared as booleans (zero or nonzero).
    on_device: whether a GPU computes the intervals of keys from arrays on it; the host lowers other kinds.
    """

    name: str
    constructor: Callable[..., Mask]
    leaves: tuple[str, ...]
    shapes: Callable[[Mask, int, int, int, int | None], None] | None
    contents: Callable[[Mask, int, int], None] | None
    predicate: Callable[[Mask, Scene], Bools]
    lowering: Callable[[Mask, Context], Terms]
    text: Callable[[Mask, Callable[[Any], str]], list[str]]
    sizes: Callable[[Mask], Sizes] | None
    booleans: bool
    on_device: bool


def _leaves(mask: Mask, write: Callable[[Any], str]) -> list[str]:
    # the leaves without trailing defaults
    args = list(mask.args)
    while args and args[-1] is None:
        args.pop()
    return [write(leaf) for leaf in args]


# fmt: off
KINDS: dict[str, Kind] = {kind.name: kind for kind in (
    # name, constructor, leaves, shapes, contents, predicate, lowering, text, sizes
    Kind("full", positions.full, (), None, None,
         positions.full_pairs, positions.full_terms, _leaves, None, booleans=False, on_device=True),
    Kind("causal", positions.causal, ("offset",), by_batch, positions.offset_contents,
         positions.causal_pairs, positions.causal_terms, _leaves, batch_of, booleans=False, on_device=True),
    Kind("window", positions.window, ("left", "right", "offset"), by_batch, positions.offset_contents,
         positions.window_pairs, positions.window_terms, _leaves, batch_of, booleans=False, on_device=True),
    Kind("documents", packing.documents, ("ids_q", "ids_k"), packing.documents_shapes, packing.documents_contents,
         packing.documents_pairs, packing.documents_terms, _leaves,
         packing.documents_sizes, booleans=False, on_device=True),
    Kind("packed", packing.documents, ("cu_q", "cu_k"), packing.packed_shapes, packing.packed_contents,
         packing.packed_pairs, packing.packed_terms, packing.packed_text,
         packing.packed_sizes, booleans=False, on_device=True),
    Kind("keys", lengths.keys, ("start", "stop"), by_batch, lengths.keys_contents,
         lengths.keys_pairs, lengths.keys_terms, lengths.keys_text, batch_of, booleans=False, on_device=True),
    Kind("prefix", lengths.prefix, ("n",), by_batch, lengths.prefix_contents,
         lengths.prefix_pairs, lengths.prefix_terms, _leaves, batch_of, booleans=False, on_device=True),
    Kind("padding", lengths.padding, ("tokens",), lengths.padding_shapes, lengths.padding_contents,
         lengths.padding_pairs, lengths.padding_terms, _leaves, lengths.padding_sizes, booleans=True, on_device=True),
    Kind("global_tokens", lengths.global_tokens, ("n",), lengths.global_tokens_shapes, lengths.global_tokens_contents,
         lengths.global_tokens_pairs, lengths.global_tokens_terms, _leaves,
         lengths.global_tokens_sizes, booleans=False, on_device=False),
    Kind("columns", layouts.columns, ("start", "stop"), layouts.bounds_shapes, layouts.bounds_contents,
         layouts.columns_pairs, layouts.bounds_terms, _leaves, layouts.bounds_sizes, booleans=False, on_device=False),
    Kind("ranges", layouts.ranges, ("start", "stop"), layouts.bounds_shapes, layouts.bounds_contents,
         layouts.ranges_pairs, layouts.bounds_terms, _leaves, layouts.bounds_sizes, booleans=False, on_device=False),
    Kind("strided", positions.strided, ("s", "phase"), None, None,
         positions.strided_pairs, positions.strided_terms, positions.strided_text,
         None, booleans=False, on_device=False),
    Kind("dilated", positions.dilated, ("radius", "step"), None, None,
         positions.dilated_pairs, positions.dilated_terms, _leaves, None, booleans=False, on_device=False),
    Kind("chunked", positions.chunked, ("size",), None, None,
         positions.chunked_pairs, positions.chunked_terms, _leaves, None, booleans=False, on_device=False),
    Kind("tiles", layouts.tiles, ("layout", "block_q", "block_k"), layouts.tiles_shapes, None,
         layouts.tiles_pairs, layouts.tiles_terms, layouts.tiles_text,
         layouts.tiles_sizes, booleans=True, on_device=False),
    Kind("dense", layouts.dense, ("allowed",), layouts.dense_shapes, None,
         layouts.dense_pairs, layouts.dense_terms, _leaves, layouts.dense_sizes, booleans=True, on_device=False),
    Kind("tree", trees.tree, ("parents",), trees.tree_shapes, trees.tree_contents,
         trees.tree_pairs, trees.tree_terms, _leaves, trees.tree_sizes, booleans=False, on_device=False),
    Kind("select", selection.select, ("indices", "block", "rows"), selection.select_shapes, selection.select_contents,
         selection.select_pairs, selection.select_terms, selection.select_text,
         selection.select_sizes, booleans=False, on_device=False),
    Kind("per_head", heads.per_head, (), heads.per_head_shapes, None,
         heads.per_head_pairs, heads.per_head_terms, heads.per_head_text, None, booleans=False, on_device=False),
)}
# fmt: on
