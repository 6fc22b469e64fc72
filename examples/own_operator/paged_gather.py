"""Keys of a paged KV cache, gathered by block table: an operator with its contract."""

import torch

import llm_op_guard as og


@og.guard
def paged_gather(cache: torch.Tensor, block_table: torch.Tensor, length: int) -> torch.Tensor:
    """The first `length` keys of each sequence, [sequences, length, kv heads, head_dim].

    Contract:
        cache: floating[num_blocks, block_size, _, _] @ dev
        block_table: integer[_, max_blocks] @ dev
        length: int
        require(
            0 <= length <= max_blocks * block_size,
            id="fits_the_table",
            because="a sequence has max_blocks blocks at most",
            hint="the block table is that of a shorter batch",
        )
        require(
            within(block_table, 0, num_blocks),
            id="blocks_in_cache",
            error=IndexError,
            because="a block outside of the cache is another sequence's memory",
            hint="-1 marks blocks that are not used yet: cut the table to the length" if lowest(block_table) < 0
            else "the table is of another cache",
        )
    """
    keys = cache[block_table.long()]
    sequences, blocks, size = keys.shape[:3]
    return keys.reshape(sequences, blocks * size, *keys.shape[3:])[:, :length]
