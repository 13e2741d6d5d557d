"""What SGLang's prefix tree holds, in blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ellm_sgl.memory.shape import NO_BLOCKS, IntArray
from ellm_sgl.sglang.versions import adapter

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
    from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey, TreeNode

_BLOCKS = "_ellm_blocks"
"""Attribute of a `TreeNode`: its blocks."""


def blocks_of(node: TreeNode, page_size: int) -> IntArray:
    """A node's blocks in token order. Looked up once: on a GPU its slots are on the device."""
    blocks: IntArray | None = getattr(node, _BLOCKS, None)
    if blocks is None or len(blocks) * page_size != len(node.value):  # split since then
        blocks = node.value[::page_size].cpu().numpy() // page_size
        setattr(node, _BLOCKS, blocks)
    return blocks


def key_of(req: Req) -> RadixKey:
    """The tree's key of all that the request has."""
    return adapter().radix_key(req.origin_input_ids + req.output_ids, req)


def peek(tree: RadixCache, key: RadixKey) -> IntArray:
    """Blocks that the tree has of `key`, whether resident or not. Nothing of the tree changes, nor
    when it was used last: ranks may look at it in different turns."""
    page = tree.page_size
    key = key.page_aligned(page)
    node, found = tree.root_node, [NO_BLOCKS]
    while len(key) and (child := node.children.get(key.child_key(page))) is not None:
        same = child.key.match(key, page_size=page)
        found.append(blocks_of(child, page)[: same // page])
        if same < len(child.key):
            break
        node, key = child, key[same:]
    return np.concatenate(found)


def prefixes_of(tree: BasePrefixCache, reqs: Sequence[Req]) -> IntArray:
    """Blocks that the tree has of any of these requests."""
    if not hasattr(tree, "root_node"):  # SGLang's cache of chunks has no tree
        return NO_BLOCKS
    return np.unique(np.concatenate([NO_BLOCKS, *(peek(tree, key_of(req)) for req in reqs)]))
