"""Norms: the classes of the modeling files that are named so."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from types import ModuleType

from llm_op_guard.install.installer import Candidate
from llm_op_guard.install.recognise import digest_of, innermost
from llm_op_guard.integrations.transformers.known import Code, Family, KnownCode, known

FAMILIES = (
    Family(
        "norm:rms_norm",
        {
            "580bd6ee67df25ac": Code(
                "llama and 141 others: weight times the rounded norm", versions=("4.57.6", "5.24.0")
            ),
            "23036fa880041935": Code(
                "afmoe, gpt_oss, olmo2 and 9 others: rounded after the weight", versions=("4.57.6", "5.24.0")
            ),
            "324fb7237d0df213": Code(
                "helium, lara_mini, nemotron_h: a weight in float32, rounded after it", versions=("4.57.6", "5.24.0")
            ),
            "95497746b2a06020": Code("gradium_phonon_tts: in the input's dtype"),
            "e5547167e79a22b7": Code("pocket_tts: scaled by the variance"),
        },
    ),
    Family(
        "norm:t5_layer_norm",
        {
            "a957ed17b0aac25d": Code(
                "t5, mt5, idefics and 7 others: the result in the weight's dtype", versions=("4.57.6", "5.24.0")
            )
        },
    ),
    Family(
        "norm:rms_norm_of_x",
        {
            "27a15487072d48dc": Code("gemma, qwen3_next and 12 others: 1 + weight", versions=("4.57.6", "5.24.0")),
            "667763d612b1f563": Code("moshi, kyutai_speech_to_text", versions=("4.57.6", "5.24.0")),
            "d7eb2e34c23aad99": Code("llama4: the weight after rounding", versions=("4.57.6", "5.24.0")),
            "8786785913f6b30e": Code("muse_spark: 1 + weight, added in its dtype"),
            "490759a100550fdd": Code("muse_spark: scaled before the norm"),
        },
    ),
    Family("norm:rms_norm_of_tensor", {"0a102fa37c957016": Code("imagegpt", versions=("4.57.6", "5.24.0"))}),
    Family("norm:rms_norm_with_scale", {"d1ade7ca71fada86": Code("gemma3n, gemma4 and 6 others")}),
    Family(
        "norm:rms_norm_of_x_with_scale",
        {"71dd80028f9bd526": Code("gemma3n: without scale, a weight of one number", versions=("4.57.6",))},
    ),
    Family(
        "norm:rms_norm_on_any_device",
        {"8dc87bb4fd823f51": Code("falcon_mamba: the weight follows the input", versions=("4.57.6",))},
    ),
    Family("norm:unweighted_rms_norm", {"ddc1a7427e850ba7": Code("inkling2, inkling2_loop")}),
    Family(
        "norm:unweighted_rms_norm_of_x",
        {
            "da7fe6591d571b31": Code(
                "nanochat, hrm_text, falcon_mamba, esmfold2; L2 norms of llama4 and dory", versions=("4.57.6", "5.24.0")
            ),
            "f5bbfb1cd86a44ae": Code("deepseek_v4, glm5_next: the factor is rounded"),
            "c9c202baf8b9a877": Code("hy_v4, hy_v4_vl: the factor alone"),
        },
    ),
    Family(
        "norm:affine_norm_of_x",
        {
            "5dbf72a7fb222e95": Code("xlstm: RMSNorm", versions=("4.57.6", "5.24.0")),
            "60179a37d0f8b8ec": Code("esm: LayerNorm of ESMFold, with its weights in bfloat16 where the input is"),
            "6ac91e469138b947": Code("esm: the same", versions=("4.57.6",)),
        },
    ),
    Family(
        "norm:gated_rms_norm",
        {
            "5a7164316e774bd0": Code("qwen3_next, qwen3_5, qwen3_5_moe, qwen4_exp, olmo_hybrid"),
            "a07fe28bcba710d6": Code("qwen3_next: the weight after rounding", versions=("4.57.6",)),
            "e32fc9187f856433": Code("bailing_hybrid, glm5_next, kimi_linear, lara_mini: no default works"),
        },
    ),
    Family(
        "norm:grouped_rms_norm",
        {
            "c8b1b7c057de1b6d": Code(
                "mamba2, bamba, granitemoehybrid, nemotron_h, zamba2", versions=("4.57.6", "5.24.0")
            ),
            "5e56ae3452b7c256": Code("mamba2, bamba, granitemoehybrid: in one group", versions=("4.57.6",)),
        },
    ),
    Family(
        "norm:grouped_rms_norm_of_sequences",
        {
            "f7ef1d2426d168da": Code("falcon_h1"),
            "80db7df84b312ba9": Code("falcon_h1: one token loses its axis", versions=("4.57.6",)),
        },
    ),
    Family(
        "norm:affine_layer_norm",
        {
            "87ce87b33b545848": Code("cohere, cohere2, cohere2_moe, cohere_compass", versions=("4.57.6", "5.24.0")),
            "0dcbe6569cf22e54": Code("chameleon: weights of each head", versions=("4.57.6", "5.24.0")),
            "76fe59a44f3129f1": Code("deberta", versions=("4.57.6", "5.24.0")),
            "3dbf92fe8ad50700": Code("gradium_phonon_tts, pocket_tts: in the input's dtype"),
        },
    ),
    Family(
        "norm:layer_norm",
        {
            "20df0eb7ccf62066": Code("olmo: in float32, without a weight", versions=("4.57.6", "5.24.0")),
            "2291218ca49d5de6": Code("esmfold2: in float32"),
            "dad255cb4085ebc8": Code("esmc: the result in the input's dtype"),
            "17def88f47eeb38b": Code("videoprism: 1 + weight"),
        },
    ),
    Family(
        "norm:layer_norm_of_input",
        {
            "a1b1a15208ac1151": Code("nemotron: 1 + weight"),
            "11d003b3791a4e8b": Code("nemotron: 1 + weight", versions=("4.57.6",)),
        },
    ),
    Family(
        "norm:layer_norm_of_features",
        {"47d68db1323a583c": Code("convnext, sam and 18 others", versions=("4.57.6", "5.24.0"))},
    ),
    Family(
        "norm:layer_norm_2d", {"e27b5a8a15ca6b1d": Code("eomt, eomt_dinov3, videomt", versions=("4.57.6", "5.24.0"))}
    ),
    Family("norm:layer_norm_of_channels", {"8edfbe5411daf199": Code("vitdet", versions=("4.57.6", "5.24.0"))}),
    Family("norm:layer_norm_of_rows", {"584ee4e2c5731df9": Code("squeezebert", versions=("4.57.6", "5.24.0"))}),
    Family("norm:layer_norm_per_head", {"5b267e5f8fee2eb0": Code("stablelm", versions=("4.57.6", "5.24.0"))}),
    Family("norm:layer_norm_with_gamma", {"2a3d9c77db3b7113": Code("moonshine_streaming")}),
    Family("norm:group_norm_of_input", {"546f9dd0df349c7c": Code("emu3", versions=("4.57.6", "5.24.0"))}),
    Family("norm:query_key_norm", {"abaa7e7611180e5e": Code("zaya")}),
    Family("norm:frozen_batch_norm", {"85ab253e63d3a082": Code("detr and 13 others", versions=("4.57.6", "5.24.0"))}),
)

# Methods that a forward calls on itself. They keep the shape of what they are given, which the contracts count on.
_METHODS = {
    "_norm": {
        "c6c2526ce9be0b95": Code("gemma and 20 others: by the root of the mean square", versions=("4.57.6", "5.24.0")),
        "f7e067b7231344ca": Code("qwen4_exp: the same, in groups"),
        "f7346a4d2bf4b5a9": Code("gemma3n, gemma4 and 6 others: the same, as a power"),
        "d1ed3ddaf2274217": Code("dory: by the root of the sum of squares"),
        "1d34cd07c65896ea": Code("gemma3n: divided by the root of the mean square", versions=("4.57.6",)),
    },
    "_rms_normalize": {"3f8e311bc9f089e0": Code("xlstm", versions=("4.57.6", "5.24.0"))},
    "_apply_weight_bias": {"22306e1dfbf3d459": Code("xlstm", versions=("4.57.6", "5.24.0"))},
}

KNOWN = tuple(
    KnownCode(f"norms: {name}", rf"transformers\.models\..*Norm\w*\.{name}", code) for name, code in _METHODS.items()
)

# Code that was read and has no contract.
LEFT_OUT = {
    "63758d5293ede17c": Code("hubert, unispeech and 2 others", reason="a layer of an encoder, not a norm"),
    "65922b61e7991d51": Code("wavlm", reason="a layer of an encoder, not a norm"),
    "6c0251ea90c66dda": Code("hubert, unispeech and 2 others", reason="an encoder, not a norm"),
    "872ffbfdfac7cf2f": Code("wavlm", reason="an encoder, not a norm"),
    "c0d765b101a05bb9": Code("dbrx", reason="attention between two norms, not a norm"),
    "24151f53fb8b58a3": Code("squeezebert", reason="a convolution before a norm", versions=("4.57.6", "5.24.0")),
    "d252128698b7255b": Code("voxtral_realtime", reason="two linear layers, not a norm"),
    "3c6cab631ac71e52": Code("mobilebert", reason="a weight and a bias, not a norm", versions=("4.57.6", "5.24.0")),
    "91f5d6960654c56d": Code("axk2", reason="the norm in it is guarded by itself"),
    "147e8309e46df6e2": Code(
        "patchtsmixer, patchtst", reason="torch's BatchNorm1d between two transpositions", versions=("4.57.6", "5.24.0")
    ),
    "61a1194d5860099d": Code("cpmant", reason="it tests the width itself", versions=("4.57.6", "5.24.0")),
    "c93c93ebc2e337cd": Code("gemma3n", reason="it tests the shape itself", versions=("4.57.6", "5.24.0")),
    "9b58b3a64ddb6ab6": Code("xlstm", reason="it tests heads and width itself"),
    "f64034724ddd1583": Code(
        "pe_audio, pe_audio_video, pe_video",
        reason="its statistics are those of what a mask keeps, which may have many shapes",
    ),
    "a7df7c4a2bd90d08": Code(
        "emu3", reason="scaled by a second input through convolutions", versions=("4.57.6", "5.24.0")
    ),
    "8d957352facd8bef": Code("esmfold2", reason="scaled by a second input through linear layers"),
    "8ecde14c760f53bc": Code("vibevoice", reason="scaled by a second input through linear layers"),
    "68bdc42a1505ccc8": Code("wavtokenizer", reason="scaled by an embedding, whose ids may have many shapes"),
    "34060aaef75a536e": Code(
        "hubert, unispeech and 2 others", reason="a layer of an encoder, not a norm", versions=("4.57.6",)
    ),
    "11002a08f76c5176": Code("wavlm", reason="a layer of an encoder, not a norm", versions=("4.57.6",)),
    "bdad32232f664988": Code("hubert, unispeech and 2 others", reason="an encoder, not a norm", versions=("4.57.6",)),
    "409dfa034d17cc8b": Code("wavlm", reason="an encoder, not a norm", versions=("4.57.6",)),
    "58f283ceb68e7118": Code("dbrx", reason="attention between two norms, not a norm", versions=("4.57.6",)),
    "3f31db052c0bed7c": Code("xlstm", reason="it tests heads and width itself", versions=("4.57.6",)),
}

_NAMED_SO = re.compile(r"Norm(Gated|1P|2d|PerHead)?$")


def candidates(module: ModuleType) -> Iterator[Candidate]:
    """The `forward` of every class that a modeling file calls a norm."""
    for cls in list(module.__dict__.values()):
        if (
            inspect.isclass(cls)
            and cls.__module__ == module.__name__
            and _NAMED_SO.search(cls.__name__)
            and "forward" in cls.__dict__
        ):
            yield _forward_of(cls)


def _forward_of(cls: type) -> Candidate:
    site, operator = f"{cls.__module__}.{cls.__name__}.forward", f"{cls.__name__}.forward"
    found = cls.__dict__["forward"]
    if (left_out := LEFT_OUT.get(_digest(found))) is not None:
        return Candidate(site, operator, reason=left_out.reason)
    for name, code in _METHODS.items():
        method = inspect.getattr_static(cls, name, None)
        if method is not None and (digest := _digest(method)) not in code:
            return Candidate(site, operator, reason=f"its {name} is not one that is known (fingerprint {digest})")
    return known(site, operator, found, *FAMILIES)


def _digest(found: object) -> str:
    return digest_of(innermost(found))
