"""One call of a model, watched: `first_nonfinite`."""

from __future__ import annotations

import threading
import warnings
from typing import Any

from llm_op_guard.errors import GuardInternalWarning
from llm_op_guard.guard.reading import is_a, is_tensor
from llm_op_guard.nonfinite.calls import observed, random_kept, uncompiled
from llm_op_guard.nonfinite.finding import NonFinite
from llm_op_guard.nonfinite.tensors import tensors_in
from llm_op_guard.nonfinite.watch import Watch, parameters_of


def first_nonfinite(model: Any, /, *args: Any, **kwargs: Any) -> NonFinite | None:
    """Call a model, and say where the first NaN or infinity came from; None where all was finite.

    `model` is an nn.Module or a method of one (`model.generate`); it is called with the arguments. Where the result
    has a loss (`labels` for models of Transformers; a scalar) that requires gradients, the backward pass is gone
    through, too: gradients are computed and dropped, those in `.grad` stay what they are.

    The call is a real one: running statistics and caches that are handed in change as they always do. Random numbers
    of torch are put back afterwards. What torch.compile made is called as it was written. Values of tensors that
    cannot be read (meta, fake, sparse, nested, quantised, subclasses) are not looked at.

    Raises TypeError for anything else than a module, and what the call raises, to which a finding is added as a note;
    warns (GuardInternalWarning) where nothing was looked at.
    """
    root = _module_of(model)
    watch = Watch(thread=threading.get_ident())
    watch.place_all(root)
    try:
        with random_kept(), uncompiled(), observed(watch):
            loss = _loss(model(*args, **kwargs))
            if watch.found is None and loss is not None:
                _go_back(loss, root, args, kwargs)
    except Exception as error:
        if watch.found is not None:
            error.add_note(f"before that, llm-op-guard had found this:\n{watch.found}")
        raise
    finally:
        watch.is_on = False
        watch.gradients.release()
    if not watch.calls:
        message = (
            "nothing was looked at: no module was called by its `__call__`, in this thread and before this returned"
        )
        warnings.warn(GuardInternalWarning(message), stacklevel=2)
    return watch.found or watch.suspect


def _module_of(model: Any) -> Any:
    from torch.nn import Module  # noqa: PLC0415

    root = model if is_a(model, Module) else getattr(model, "__self__", None)
    if not is_a(root, Module):
        raise TypeError(f"first_nonfinite takes an nn.Module or a method of one, not a {type(model).__name__}")
    return root


def _loss(result: Any) -> Any:
    """The loss in a result that gradients can be had of; None where there is none."""
    if is_a(result, dict):
        result = dict.get(result, "loss")
    elif is_a(result, tuple) and result:
        result = result[0]
    if not is_tensor(result) or not result.requires_grad or result.numel() != 1:
        return None
    return result if result.dtype.is_floating_point else None


def _go_back(loss: Any, root: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The backward pass, for its hooks: no gradient is kept."""
    import torch  # noqa: PLC0415

    given = [x for _, x in tensors_in((args, kwargs), "") if x.requires_grad]
    wanted = [*(parameter for _, parameter in parameters_of(root) if parameter.requires_grad), *given]
    if not wanted:
        return
    try:
        torch.autograd.grad(loss, wanted, allow_unused=True)
    except RuntimeError as error:  # checkpoints with use_reentrant=True take only `backward`
        message = f"the backward pass was not looked at: {error}"
        warnings.warn(GuardInternalWarning(message), stacklevel=3)
