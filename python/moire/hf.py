"""Hugging Face models on moire: after `moire.hf.register()`, experts_implementation="moire" runs
every experts module.

Works for models of transformers >= 5 whose experts use its ExpertsInterface. What a module computes
is recognised once, by comparing its own gate, or its activation where it has no gate, on a few
numbers with what moire has, in every layout of gate and up; a module that moire cannot run raises
moire.Unsupported with the reason. Nothing falls back silently.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Optional

import torch
from torch.utils.weak import WeakIdKeyDictionary

from .errors import invalid, unsupported
from .functional import moe
from .layouts import Activation, GluLayout
from .recipes import Recipe, RecipeLike
from .values import described, wrong
from .weight_cache import ParameterCopies

__all__ = ["ExpertsSpec", "experts_forward", "recognise", "register", "weights_changed"]

# What transformers' use_experts_implementation gives every experts module.
_NEEDS = ("has_gate", "has_bias", "is_transposed", "down_proj")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_INSTEAD = "use another experts_implementation ('eager', 'grouped_mm') for this model"
_STATES = "_module_state_mapping"  # where Torch keeps what is applied to modules, FSDP2 too
_LIMITS, _ALPHAS = ("limit", "swiglu_limit"), ("alpha", "swiglu_alpha")  # of gates that clamp
# Largest difference of two double-precision evaluations of one gate, relative to the largest value.
_SAME_FUNCTION = 1e-6


def __dir__() -> list[str]:
    return __all__


class ExpertsSpec(NamedTuple):
    """What an experts module computes, in moire's words."""

    act: Activation
    layout: GluLayout
    weight_layout: str


def register(name: str = "moire", recipe: RecipeLike = None) -> None:
    """Makes experts_implementation=`name` available, and ep_implementation=`name` in a
    DistributedConfig. With an 8-bit `recipe` the experts' weights are quantised when they change,
    and everything else on the fly.

    Calling it again is fine; a name that has another recipe, or is not moire's, is an error.
    """
    if not isinstance(name, str):
        raise invalid(f"moire.hf.register: name is {described(name)}, must be a string")
    recipe = Recipe.of(recipe, "moire.hf.register: recipe")
    try:
        from transformers.integrations.moe import ExpertsInterface
    except ImportError as e:
        raise ImportError(
            "moire.hf.register: needs transformers >= 5 with its ExpertsInterface: pip "
            "install 'transformers>=5'"
        ) from e
    forward = functools.partial(experts_forward, recipe=recipe)
    made = dict.fromkeys((ExpertsInterface, *_interfaces_of_quantised_experts()), forward)
    made.update(_expert_parallelism(name))
    for interface in made:
        _check_is_free(name, recipe, interface().get(name, forward))
    for interface, implementation in made.items():
        interface.register(name, implementation)


def _check_is_free(name, recipe, found):
    """`found` is what the name stands for now."""
    call, made_by = "moire.hf.register", getattr(getattr(found, "func", found), "__module__", None)
    if name == "eager" or made_by != __name__:  # "eager" stands in no registry
        raise invalid(
            f"{call}: name is {name!r}, which is an implementation of transformers or of another "
            f"library, for all who ask for that; choose another name, such as 'moire'"
        )
    theirs = getattr(found, "keywords", {}).get("recipe", recipe)
    if theirs != recipe:
        raise invalid(
            f"{call}: name is {name!r}, which is registered with {theirs}, and models may run it; "
            f"register {recipe} under another name"
        )


def _expert_parallelism(name):
    """How experts of other ranks get their tokens, for a transformers that asks: by its registry
    of these.
    """
    try:
        from transformers.distributed import expert_parallel as theirs

        from .expert_parallel import ExpertParallel
    except ImportError:
        return {}

    class MoireEP(theirs.EPImplementation):
        """A token goes once to each rank that has one of its experts, whichever implementation of
        experts runs there.
        """

        def __init__(self, experts, ep_mesh, tp_mesh):
            super().__init__(experts, ep_mesh, tp_mesh)
            if tp_mesh.size() != 1:
                raise unsupported(
                    f"moire.hf: ep_implementation={name!r} needs tp_size=1, found "
                    f"{tp_mesh.size()}: ranks that share a batch would each dispatch all of it; "
                    "use 'all_to_all'"
                )
            num_experts = self.num_local_experts * ep_mesh.size()
            self.ranks = ExpertParallel(ep_mesh.get_group(), num_experts=num_experts)

        def __call__(self, hidden_states, top_k_index, top_k_weights):
            received = self.ranks.dispatch(hidden_states, top_k_index, top_k_weights)
            # Others than moire drop a choice by the number past the last.
            nobody, idx = self.num_local_experts, received.topk_idx.long()
            weights = received.topk_weights.to(top_k_weights.dtype)
            y = self.experts_forward(received.x, torch.where(idx < 0, nobody, idx), weights)
            return self.ranks.combine(y, received)

    return {theirs.EPImplementationInterface: MoireEP}


def _interfaces_of_quantised_experts():
    """Interfaces of their own that models take instead of ExpertsInterface, and that fail with a
    KeyError for a name that only it knows: FP8 checkpoints get experts_forward's sentence.
    """
    try:
        from transformers.integrations.finegrained_fp8 import FP8ExpertsInterface
    except ImportError:  # this transformers has none
        return ()
    return (FP8ExpertsInterface,)


def experts_forward(
    self,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    recipe: Optional[Recipe] = None,
) -> torch.Tensor:
    """The forward of an experts module `self`: hidden_states [T, H], top_k_index and top_k_weights
    [T, k].

    An index of num_experts (experts of other ranks) drops the choice and leaves its weight without
    a gradient.
    """
    spec = recognise(self)
    fc1 = _fc1(self)
    w1, w2 = getattr(self, fc1), self.down_proj
    compute_dtype = None
    if hidden_states.dtype != w1.dtype and not torch.is_autocast_enabled(hidden_states.device.type):
        compute_dtype = w1.dtype
    y = moe(
        hidden_states,
        w1,
        w2,
        top_k_index,
        top_k_weights,
        b1=getattr(self, f"{fc1}_bias") if self.has_bias else None,
        b2=self.down_proj_bias if self.has_bias else None,
        act=spec.act,
        layout=spec.layout,
        weight_layout=spec.weight_layout,
        compute_dtype=compute_dtype,
        recipe=recipe,
        **_copies(self, spec, recipe, {"w1_quantized": w1, "w2_quantized": w2}),
    )
    return y.to(hidden_states.dtype)


def weights_changed(model: torch.nn.Module) -> None:
    """Says that weights of experts in it (or of the experts module that it is) were written in a
    way that nobody counts, through `.data` or by another library's kernel, not by an optimizer's
    step: the next forward in 8 bits quantises them anew.
    """
    if not isinstance(model, torch.nn.Module):
        raise wrong("moire.hf.weights_changed: model", model, "a torch.nn.Module")
    for module in model.modules():
        for copies in vars(module).get("_moire_copies", {}).values():
            copies.invalidate()


def _fc1(experts):
    return "gate_up_proj" if experts.has_gate else "up_proj"


def _copies(experts, spec, recipe, weights):
    """The weights in 8 bits, kept on the module, where the recipe reads them so."""
    if recipe is None or not recipe.is_quantized:
        return {}
    caches = experts.__dict__.setdefault("_moire_copies", {})
    found = {}
    for name, weight in weights.items():
        if (name, recipe) not in caches:
            caches[name, recipe] = ParameterCopies(recipe, spec.weight_layout)
        shards = [] if torch.compiler.is_compiling() else _shards_of(weight)
        found[name] = caches[name, recipe].of("moire.hf", weight, None, shards)
    return found


_gathered = WeakIdKeyDictionary()  # parameters: what FSDP2 knows of those that it gathers


def _shards_of(weight):
    """What FSDP2 gathers a parameter from, if it does: writes into those it counts nowhere else."""
    if weight not in _gathered:
        owners = (p for p in _parameters_of_fsdp2() if getattr(p, "_unsharded_param", 0) is weight)
        _gathered[weight] = [weakref.ref(owner) for owner in owners]
    owners = (owner() for owner in _gathered[weight])
    return [owner.sharded_param for owner in owners if owner is not None]


def _parameters_of_fsdp2():
    """Its own records, of all modules: the experts do not know in which of those around them."""
    states = getattr(sys.modules.get("torch.distributed._composable_state"), _STATES, {})
    for state in list(states.values()):
        state = state() if isinstance(state, weakref.ref) else state
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # before torch 2.13
            groups = [getattr(state, "_fsdp_param_group", None)]
        for group in filter(None, groups):
            yield from group.fsdp_params


def recognise(experts: torch.nn.Module) -> ExpertsSpec:
    """The ExpertsSpec of an experts module, worked out on first use and kept on it until what it
    came from is another; Unsupported says why there is none.
    """
    spec = getattr(experts, "_moire_spec", None)
    if torch.compiler.is_compiling():
        return _recognised_at(id(experts)) if spec is None else spec
    if spec is None or experts.__dict__.get("_moire_spec_of") != _deciding(experts):
        spec = _recognised(experts)
    return spec


def _deciding(experts):
    """What a spec comes from, as far as somebody may assign it."""
    kept = experts.__dict__
    names = ("act_fn", "has_gate", "is_transposed", *_LIMITS, *_ALPHAS)
    return [experts._modules.get("act_fn"), *(kept.get(name) for name in names)]


@torch.compiler.assume_constant_result
def _recognised_at(address: int) -> ExpertsSpec:
    """Of the module at an address: tracers before torch 2.13 have no constant for a module."""
    return _recognised(ctypes.cast(address, ctypes.py_object).value)


def _recognised(experts: torch.nn.Module) -> ExpertsSpec:
    _check_has(experts, _NEEDS)
    _refuse(experts)
    # NOTE: a tracer, fake tensors, a default device and autocast are modes of the thread; under
    # them the gate's values would be unknown, and recorded as a part of the model.
    with ThreadPoolExecutor(1) as thread:
        act, layout = thread.submit(_gate_of, experts).result()
    spec = ExpertsSpec(act, layout, "in_out" if experts.is_transposed else "out_in")
    experts.__dict__.update(_moire_spec=spec, _moire_spec_of=_deciding(experts))
    return spec


def _check_has(experts, names):
    missing = [name for name in names if not hasattr(experts, name)]
    if missing:
        raise invalid(
            f"moire.hf: found {described(experts)} without {', '.join(missing)}, needs the "
            f"experts module of a model of transformers >= 5"
        )


def _refuse(experts):
    name = type(experts).__name__
    _check_has(experts, (_fc1(experts), "_apply_gate" if experts.has_gate else "act_fn"))
    if getattr(experts, "has_post_expert_norm", False):
        raise unsupported(
            f"moire.hf: {name} normalises each expert's output before the weighted sum; moire "
            f"applies the routing weight "
            f"before the second linear layer; {_INSTEAD}"
        )
    for weight in (_fc1(experts), "down_proj"):
        dtype = getattr(experts, weight).dtype
        if dtype not in _DTYPES:
            raise unsupported(
                f"moire.hf: {name}.{weight} is {dtype}, needs float32, bfloat16 or float16 (a "
                f"quantised checkpoint: dequantised as it is loaded); {_INSTEAD}"
            )


@torch.no_grad()
def _gate_of(experts):
    """(activation, layout) for which moire computes what the module's own _apply_gate does, or
    its act_fn.
    """
    name = type(experts).__name__
    candidates = list(_candidates(experts))
    reach = 2 * max([6.0] + [act.limit for act, _ in candidates])
    numbers = torch.rand(64, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    probe = (2 * numbers - 1) * reach
    try:
        wanted = (experts._apply_gate if experts.has_gate else experts.act_fn)(probe).double()
    except Exception as e:
        raise unsupported(
            f"moire.hf: {name}'s gate could not be evaluated to recognise it ({e}); {_INSTEAD}"
        ) from e
    for act, layout in candidates:
        found = _gate(probe, act, layout)
        if (
            found.shape == wanted.shape
            and (found - wanted).abs().max() <= _SAME_FUNCTION * wanted.abs().max()
        ):
            return act, layout
    acts = ", ".join(dict.fromkeys(act.kind for act, _ in candidates))
    where = " in any layout of gate and up" if experts.has_gate else " of a gate alone"
    raise unsupported(
        f"moire.hf: {name} has an activation that moire has not: none of {acts}{where}; {_INSTEAD}"
    )


def _candidates(experts):
    acts = [Activation(kind) for kind in ("swiglu", "geglu_tanh", "reglu", "reglu2")]
    if not experts.has_gate:
        yield from ((act, GluLayout(order="ungated")) for act in acts)
        return
    limit = next((v for v in (getattr(experts, n, None) for n in _LIMITS) if v), None)
    if limit is not None:
        alphas = {getattr(experts, n, None) for n in _ALPHAS} - {None} | {1.0}
        acts += [
            Activation.clamped_swiglu(limit, alpha, offset)
            for alpha in alphas
            for offset in (0.0, 1.0)
        ]
    for block in (0, 1):
        for order in ("gate_first", "up_first"):
            for act in acts:
                yield act, GluLayout(block, order)


def _gate(z, act, layout):
    """moire's activations in double, from their definitions."""
    a, b = z, 1
    if layout.order != "ungated":
        first, second = z.chunk(2, dim=-1) if layout.block == 0 else (z[..., ::2], z[..., 1::2])
        a, b = (first, second) if layout.order == "gate_first" else (second, first)
    if act.kind == "swiglu":
        return torch.nn.functional.silu(a) * b
    if act.kind == "geglu_tanh":
        return torch.nn.functional.gelu(a, approximate="tanh") * b
    if act.kind in ("reglu", "reglu2"):
        return a.relu() ** (1 if act.kind == "reglu" else 2) * b
    a = a.clamp(max=act.limit)
    b = b.clamp(-act.limit, act.limit) + act.offset
    return a * torch.sigmoid(act.alpha * a) * b
