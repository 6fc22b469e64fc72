"""Guards are put into Transformers and taken away again, exactly; what is not known or not ours is left alone."""

from __future__ import annotations

import functools
import gc
import inspect
import subprocess
import sys
import textwrap
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.generation import utils as generation
from transformers.integrations import sdpa_attention
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.qwen2 import modeling_qwen2

import llm_op_guard as og
from llm_op_guard import api
from llm_op_guard.install.installer import Installer
from llm_op_guard.install.recognise import innermost
from llm_op_guard.integrations import transformers as integration

LLAMA = "transformers.models.llama.modeling_llama"
LLAMA_SITES = {
    f"{LLAMA}.apply_rotary_pos_emb",
    f"{LLAMA}.eager_attention_forward",
    f"{LLAMA}.LlamaRMSNorm.forward",
    f"{LLAMA}.LlamaModel.forward",
}
SHARED_SITES = {
    "transformers.integrations.sdpa_attention.sdpa_attention_forward",
    "transformers.generation.utils.GenerationMixin.generate",
}
HOMES = [modeling_llama, modeling_qwen2, sdpa_attention, generation]
Arguments = tuple[torch.Tensor, ...]


@pytest.fixture
def bad() -> Arguments:
    """A call of apply_rotary_pos_emb that is wrong without a word."""
    return torch.randn(2, 4, 7, 16), torch.randn(2, 2, 7, 16), torch.randn(1, 7, 1), torch.randn(1, 7, 1)


def is_guarded(call: Callable[..., Any], *arguments: Any) -> bool:
    try:
        call(*arguments)
    except og.GuardError:
        return True
    return False


def functions() -> dict[str, types.FunctionType]:
    """Every function, and every method of a class, that the guarded modules define."""
    found: dict[str, types.FunctionType] = {}
    for module in HOMES:
        for name, value in vars(module).items():
            members = vars(value).items() if isinstance(value, type) else [("", value)]
            for member, inner in members:
                function = innermost(inner)
                if isinstance(function, types.FunctionType):
                    found[f"{module.__name__}.{name}.{member}"] = function
    return found


def snapshot() -> tuple[dict[str, dict[str, Any]], dict[str, tuple[Any, ...]]]:
    modules = {module.__name__: dict(vars(module)) for module in HOMES}
    codes = {
        name: (f, f.__code__, f.__defaults__, f.__kwdefaults__, f.__closure__, dict(vars(f)), f.__name__, f.__doc__)
        for name, f in functions().items()
    }
    return modules, codes


def assert_unchanged(before: Any, after: Any) -> None:
    for old, new in zip(before, after, strict=True):
        assert old.keys() == new.keys()
        for name in old:
            if isinstance(old[name], dict):
                assert old[name].keys() == new[name].keys(), name
                assert all(old[name][key] is new[name][key] for key in old[name]), name
            else:
                for one, other in zip(old[name], new[name], strict=True):
                    assert one is other or (isinstance(one, dict) and one == other), name


# ---------------------------------------------------------------- what is there, and gone again


def test_the_report_names_sites_and_refusals_with_reasons() -> None:
    report = og.install("transformers")
    assert report.libraries == ["transformers"]
    assert set(report.guarded) >= LLAMA_SITES | SHARED_SITES
    assert len(report.guarded) == len(set(report.guarded))
    assert all(refusal.reason for refusal in report.refused)
    text = str(report)
    assert text.startswith(f"llm-op-guard: {len(report.guarded)} sites guarded in transformers")
    assert f"  {LLAMA}.LlamaRMSNorm.forward" in text
    assert og.status().guarded == report.guarded


def test_restored_exactly() -> None:
    before = snapshot()
    og.install("transformers")
    now = functions()
    changed = [name for name, kept in before[1].items() if now[name].__code__ is not kept[1]]
    assert len(changed) >= len(LLAMA_SITES | SHARED_SITES), "something is there to be restored"
    assert og.uninstall("transformers") == []
    assert_unchanged(before, snapshot())
    assert og.status().guarded == []


def test_twice_is_once(bad: Arguments) -> None:
    before = snapshot()
    first = og.install("transformers")
    codes = {name: function.__code__ for name, function in functions().items()}
    second = og.install("transformers")
    assert first.guarded == second.guarded
    assert {name: function.__code__ for name, function in functions().items()} == codes
    og.uninstall()
    assert not is_guarded(apply_rotary_pos_emb, *bad)
    assert og.uninstall() == []
    assert_unchanged(before, snapshot())


def test_the_same_library_named_twice(bad: Arguments) -> None:
    with og.installed("transformers", "transformers") as report:
        assert report.libraries == ["transformers"]
        assert is_guarded(apply_rotary_pos_emb, *bad)
    assert not is_guarded(apply_rotary_pos_emb, *bad)


def test_who_reads_source_and_signature_finds_the_functions_own() -> None:
    read = [modeling_llama.repeat_kv, modeling_llama.LlamaRMSNorm.forward, modeling_llama.LlamaModel.forward]
    x, norm = torch.randn(1, 2, 3, 4), modeling_llama.LlamaRMSNorm(4)

    def found() -> list[Any]:
        return [(inspect.getsource(function), inspect.signature(function)) for function in read]

    plain = found()
    with og.installed("transformers"):
        assert found() == plain
        assert torch.equal(torch.jit.script(modeling_llama.repeat_kv)(x, 2), modeling_llama.repeat_kv(x, 2))
        assert torch.equal(torch.jit.script(norm)(x), norm(x))
    assert found() == plain


def test_a_with_block_leaves_what_was_guarded_before(bad: Arguments) -> None:
    with og.installed("transformers"):
        with og.installed("transformers"):
            assert is_guarded(apply_rotary_pos_emb, *bad)
        assert is_guarded(apply_rotary_pos_emb, *bad)
    assert not is_guarded(apply_rotary_pos_emb, *bad)


def test_a_with_block_ends_also_with_an_error(bad: Arguments) -> None:
    with pytest.raises(KeyError), og.installed("transformers"):
        raise KeyError
    assert not is_guarded(apply_rotary_pos_emb, *bad)


def test_every_earlier_holder_of_the_function_is_reached(bad: Arguments) -> None:
    holders: dict[str, Callable[..., Any]] = {
        "imported name": apply_rotary_pos_emb,
        "partial": functools.partial(apply_rotary_pos_emb, unsqueeze_dim=1),
        "registry": {"rope": modeling_llama.apply_rotary_pos_emb}["rope"],
        "module attribute": lambda *a, **_: modeling_llama.apply_rotary_pos_emb(*a),
    }
    with og.installed("transformers"):
        assert {name: is_guarded(holder, *bad) for name, holder in holders.items()} == dict.fromkeys(holders, True)
        assert holders["imported name"] is modeling_llama.apply_rotary_pos_emb
    assert {name: is_guarded(holder, *bad) for name, holder in holders.items()} == dict.fromkeys(holders, False)


def test_captured_methods_and_registered_attention_are_reached() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    attention = ALL_ATTENTION_FUNCTIONS["sdpa"]
    norm = modeling_llama.LlamaRMSNorm(64)
    captured = norm.forward
    module = torch.nn.Module()
    q, k = torch.randn(2, 2, 3, 4), torch.randn(1, 2, 3, 4)
    assert not is_guarded(captured, torch.randn(2, 1))
    with og.installed("transformers"):
        assert is_guarded(captured, torch.randn(2, 1))
        assert is_guarded(attention, module, q, k, k, None)


def run(code: str, *options: str) -> str:
    process = subprocess.run(
        [sys.executable, *options, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    return process.stdout.strip()


def test_modules_loaded_later_are_guarded() -> None:
    out = run(
        """
        import sys
        import llm_op_guard as og
        report = og.install("transformers")
        assert "transformers" not in sys.modules and "torch" not in sys.modules
        assert report.guarded == [] and report.refused == []
        import torch
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
        q = torch.zeros(2, 4, 7, 16)
        try:
            apply_rotary_pos_emb(q, q, torch.zeros(1, 7, 1), torch.zeros(1, 7, 1))
        except og.GuardError as error:
            print(error.violations[0].observed)
        print(*og.status().guarded, sep="\\n")
        code = apply_rotary_pos_emb.__code__
        og.uninstall()
        assert apply_rotary_pos_emb.__code__ is not code
        from transformers.models.mistral import modeling_mistral
        print(og.status().guarded, [name for name in vars(modeling_mistral) if "guard" in name])
        """
    ).splitlines()
    assert out[0] == "cos.shape[2] = 1"
    assert set(out[1:-1]) >= LLAMA_SITES
    assert out[-1] == "[] []"


# ---------------------------------------------------------------- what is refused


def refusals() -> dict[str, str]:
    return {refusal.site: refusal.reason for refusal in og.install("transformers").refused}


def test_a_replaced_callee_makes_code_unknown(monkeypatch: pytest.MonkeyPatch, bad: Arguments) -> None:
    code = apply_rotary_pos_emb.__code__

    def rotate_half(x: torch.Tensor) -> torch.Tensor:
        return torch.cat((x[..., 1::2], x[..., ::2]), dim=-1)

    monkeypatch.setattr(modeling_llama, "rotate_half", rotate_half)
    reason = refusals()[f"{LLAMA}.apply_rotary_pos_emb"]
    assert "its code is not one that a contract was written for (fingerprint " in reason
    assert f"{LLAMA}.apply_rotary_pos_emb" not in og.status().guarded
    assert apply_rotary_pos_emb.__code__ is code
    assert not is_guarded(apply_rotary_pos_emb, *bad)
    # What stands next to it is still known.
    assert f"{LLAMA}.LlamaRMSNorm.forward" in og.status().guarded


def test_a_replaced_function_is_unknown(monkeypatch: pytest.MonkeyPatch, bad: Arguments) -> None:
    def apply_rotary_pos_emb(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
        return q, k

    apply_rotary_pos_emb.__module__ = LLAMA
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", apply_rotary_pos_emb)
    assert "fingerprint" in refusals()[f"{LLAMA}.apply_rotary_pos_emb"]
    assert modeling_llama.apply_rotary_pos_emb(*bad) == bad[:2]


def test_a_callable_that_is_no_function_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Kernel:
        __module__ = LLAMA

        def __call__(self, *args: Any) -> Any:
            return args

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", Kernel())
    assert refusals()[f"{LLAMA}.apply_rotary_pos_emb"] == "not a Python function but Kernel"


def test_a_function_that_a_version_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sdpa_attention, "sdpa_attention_forward")
    site = "transformers.integrations.sdpa_attention.sdpa_attention_forward"
    assert refusals()[site] == "this version of Transformers has no such function"


def test_models_of_other_frameworks_are_left_alone() -> None:
    wants = integration.TransformersIntegration().wants
    assert wants("transformers.models.esm.modeling_esm")
    assert wants("transformers.models.deprecated.open_llama.modeling_open_llama")
    for other in ("esm.modeling_tf_esm", "llama.modeling_flax_llama", "llama.tokenization_llama", "llama"):
        assert not wants(f"transformers.models.{other}"), other


def test_an_unknown_library_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(
        og.InstallError, match=r"nothing is known of 'transfomers'.*transformers.*; known: transformers, torch"
    ):
        og.install("transfomers")
    with pytest.raises(og.InstallError, match="known: transformers"):
        og.install()
    with pytest.raises(og.InstallError, match="nothing is known of 'numpy'"):
        og.uninstall("numpy")
    with pytest.raises(og.InstallError), og.installed("transformers", "numpy"):
        pass
    assert og.status().guarded == []


def test_an_absent_library_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Absent(integration.TransformersIntegration):
        library = "a_library_that_is_not_here"

        def wants(self, module: str) -> bool:
            return module.startswith(self.library)

    monkeypatch.setitem(api._INTEGRATIONS, Absent.library, Absent)
    report = og.install(Absent.library)
    assert report.guarded == []
    assert [str(refusal) for refusal in report.refused] == [
        "a_library_that_is_not_here: the library is not installed here"
    ]
    assert isinstance(api._installers[Absent.library], Installer)


# ---------------------------------------------------------------- other people's patches


def test_a_name_that_somebody_set_later_stays_theirs(monkeypatch: pytest.MonkeyPatch, bad: Arguments) -> None:
    og.install("transformers")
    original = modeling_llama.apply_rotary_pos_emb

    def theirs(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", theirs)
    assert is_guarded(modeling_llama.apply_rotary_pos_emb, *bad)
    og.uninstall()
    assert modeling_llama.apply_rotary_pos_emb is theirs
    assert not is_guarded(theirs, *bad)


def test_code_that_somebody_swapped_later_stays_theirs(bad: Arguments) -> None:
    own = apply_rotary_pos_emb.__code__

    def theirs(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
        return "theirs"

    try:
        og.install("transformers")
        apply_rotary_pos_emb.__code__ = theirs.__code__
        with og.policy(A="off"):  # a change of policy touches every site
            assert apply_rotary_pos_emb(*bad) == "theirs"
        assert apply_rotary_pos_emb(*bad) == "theirs"
        left = og.uninstall()
        assert [refusal.site for refusal in left] == [f"{LLAMA}.apply_rotary_pos_emb"]
        assert "changed by somebody else" in left[0].reason
        assert apply_rotary_pos_emb.__code__ is theirs.__code__
    finally:
        apply_rotary_pos_emb.__code__ = own


def test_a_method_that_somebody_wrapped_later_stays_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    og.install("transformers")
    original = modeling_llama.LlamaRMSNorm.forward

    @functools.wraps(original)
    def theirs(self: Any, hidden_states: Any) -> Any:
        return original(self, hidden_states)

    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", theirs)
    norm = modeling_llama.LlamaRMSNorm(64)
    assert is_guarded(norm, torch.randn(2, 1))
    og.uninstall()
    assert modeling_llama.LlamaRMSNorm.forward is theirs
    assert not is_guarded(norm, torch.randn(2, 1))


# ---------------------------------------------------------------- policy


def test_off_gives_the_function_its_own_code_back(bad: Arguments) -> None:
    own = apply_rotary_pos_emb.__code__
    before = snapshot()
    og.install("transformers")
    ours = apply_rotary_pos_emb.__code__
    assert ours is not own
    og.set_policy(A="off", B="off")
    assert apply_rotary_pos_emb.__code__ is own
    assert_unchanged(before, snapshot())
    assert not is_guarded(apply_rotary_pos_emb, *bad)
    og.set_policy(A="raise")
    assert apply_rotary_pos_emb.__code__ is ours
    assert is_guarded(apply_rotary_pos_emb, *bad)
    og.uninstall()
    og.set_policy(A="raise")
    assert apply_rotary_pos_emb.__code__ is own


def test_installed_while_off(bad: Arguments) -> None:
    before = snapshot()
    og.set_policy(A="off", B="off")
    report = og.install("transformers")
    assert set(report.guarded) >= LLAMA_SITES
    assert_unchanged(before, snapshot())
    og.set_policy(A="raise")
    assert is_guarded(apply_rotary_pos_emb, *bad)


def test_a_with_block_that_is_off_lets_calls_through_and_says_nothing(bad: Arguments) -> None:
    og.install("transformers")
    with og.policy(A="off"):
        assert not is_guarded(apply_rotary_pos_emb, *bad)
    assert og.record.total == 0
    assert is_guarded(apply_rotary_pos_emb, *bad)


def test_off_in_the_environment_is_the_last_word(monkeypatch: pytest.MonkeyPatch, bad: Arguments) -> None:
    from llm_op_guard.policy import reset

    monkeypatch.setenv("LLM_OP_GUARD", "off")
    reset()
    before = snapshot()
    og.install("transformers")
    with og.policy(A="raise"):
        assert not is_guarded(apply_rotary_pos_emb, *bad)
    assert_unchanged(before, snapshot())


def test_policies_kill_switch_and_waivers_reach_operators_in_place() -> None:
    from transformers.models.llama import modeling_llama as llama

    rope, norm = llama.apply_rotary_pos_emb, llama.LlamaRMSNorm.forward
    codes = rope.__code__, norm.__code__
    og.install("transformers")

    def own() -> tuple[bool, bool]:
        return rope.__code__ is codes[0], norm.__code__ is codes[1]

    assert own() == (False, False)
    og.set_policy(A="off", operator="apply_rotary_pos_emb")
    assert own() == (True, False)
    with og.policy(A="raise", operator="transformers.models.llama.*"), og.policy(A="off", operator="*RMSNorm.forward"):
        assert own() == (False, False)  # on everywhere that some thread may want it
    og.set_policy(A="raise", operator="apply_rotary_pos_emb")
    og.disable()
    assert own() == (True, True)
    og.enable()
    assert own() == (False, False)

    q, table = torch.ones(1, 2, 3, 4), torch.ones(1, 3, 1)
    with og.waive("cos.shape", site=f"{llama.__name__}.apply_rotary_pos_emb", reason="on purpose"):
        rope(q, q, table, table)
    with pytest.raises(og.GuardError):
        rope(q, q, table, table)


@pytest.mark.parametrize("collects", [True, False])
def test_garbage_is_collected_afterwards_as_before(collects: bool) -> None:
    before = gc.isenabled()
    (gc.enable if collects else gc.disable)()
    try:
        with og.installed("transformers"):
            assert gc.isenabled() is collects
    finally:
        (gc.enable if before else gc.disable)()
