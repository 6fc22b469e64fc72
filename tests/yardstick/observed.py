"""What the diagnosis of each report of class B shows: argument, index, value and count, as far as it has them."""

from __future__ import annotations

# What nrm-05 measures is rounded as the machine does.
OBSERVED = {
    "att-01": ("mask", "mask[1] keeps no key (of 3, 1 row is dead)"),
    "att-02": ("attn_mask", "attn_mask[1] keeps no key (of 3, 1 row is dead)"),
    "att-04": ("attn_mask", "only(attn_mask, 0, 1) = True, highest(attn_mask) = 1.0 at attn_mask[0, 0]"),
    "att-18": ("attn_mask", "negated(attn_mask)[1] keeps no key (of 3, 1 row is dead)"),
    "emb-01": ("input", "input[1] = 100 (of 2, 1 element is wrong)"),
    "emb-03": (
        "input_ids",
        "self.config.image_token_index = 32, V = 32, "
        "count(input_ids, self.config.image_token_index) = 1 (of 3, first at input_ids[1])",
    ),
    "emb-06": ("result", "result[0] = 155 (of 1, 1 element is wrong)"),
    "emb-07": ("target", "target[1] = -1 (of 3, 1 element is wrong)"),
    "kv-01": ("positions", "highest(positions) // page = 6, highest(positions) = 100 at positions[1], W = 4"),
    "kv-04": ("kv_indptr", "last(kv_indptr) = 9 at kv_indptr[2], N = 5"),
    "kv-12": ("kwargs", "kwargs[cache_name][0] = 3, wanted[0] = 4 (of 2, 1 pair differs)"),
    "kv-18": ("scale", "scale = inf (of 1, 1 element is wrong)"),
    "lora-05": ("state", "numel(weight) = 0 at item 1 of items(state)"),
    "moe-01": ("topk_ids", "topk_ids[0, 0] = -1 (of 2, 1 element is wrong)"),
    "moe-02": ("token_ids", "token_ids[1] = 9 (of 2, 1 element is wrong)"),
    "moe-04": ("logits", "logits[0, 0] = nan (of 4, 4 elements are wrong, this one first)"),
    "moe-06": ("ids", "ids[0] = 4 (of 1, 1 element is wrong)"),
    "nrm-05": ("x", "finite(x) = True, absmax(x) = 2.19"),
    "num-01": (
        "result",
        "absmax(result) = inf at result[0, 0], largest(T) = 65504.0, finite(x) = True, finite(weight) = True",
    ),
    "pos-01": ("cache_length", "get(cache_length, 0) + L + self.padding_idx + 1 = 19, P = 18"),
    "pos-03": ("positions", "positions[1] = 40 (of 2, 1 element is wrong)"),
    "pos-04": ("position_ids", "position_ids[0] = -1 (of 2, 1 element is wrong)"),
    "pos-08": ("position_ids", "absmax(position_ids[:, :1]) = 5 at position_ids[0, 0]"),
    "pos-13": (
        "position_ids",
        "position_ids[0, 1] = 1, positions_of(attention_mask)[0, 1] = 0 (of 5, 2 pairs differ, this one first)",
    ),
    "pos-14": (
        "kwargs['attention_mask']",
        "count(kwargs['attention_mask'][:, -1], 0) = 1 (of 2, first at kwargs['attention_mask'][0, 2])",
    ),
    "pos-15": (
        "input_ids",
        "count(input_ids, image_token_id) = 3 (of 5, first at input_ids[0]), "
        "sum((t * h * w for t, h, w in grids)) // merge ** 2 = 4",
    ),
    "rag-03": ("attention_mask", "count(attention_mask[:, 0], 0) = 1 (of 1, first at attention_mask[0, 0])"),
    "rag-04": (
        "input_ids",
        "count(input_ids, pad_id) = 2 (of 4, first at input_ids[0, 2]), count(attention_mask, 0) = 0",
    ),
    "rag-09": ("token_ids", "len(ids) = 9, max_length = 8 at item 1 of token_ids"),
    "rag-10": ("found", "len(hits) = 0 at item 1 of found"),
    "txt-01": ("text", "surrogates(text) = 1"),
    "txt-03": ("text", "longest_run(text) = 5000"),
    "txt-04": ("text", "longest_run(text) = 4000"),
    "smp-02": ("stop_token_ids", "token = 50, V = 50 at item 1 of stop_token_ids"),
    "smp-06": (
        "logits",
        "highest(logits) / temperature = 83333.33333333334, highest(logits) = 25.0 at logits[0, 0], "
        "largest(T) = 65504.0",
    ),
}
