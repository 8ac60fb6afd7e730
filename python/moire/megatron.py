"""Megatron-Core's routed experts on moire: GroupedMLP where a layer's spec has TEGroupedMLP.

    spec = get_gpt_layer_with_transformer_engine_spec(num_experts=8, moe_grouped_gemm=True)
    spec = moire.megatron.use_moire(spec)

Parameters have TEGroupedMLP's names, shapes and attributes (`linear_fc1.weight0`, ...), so that
optimizers, data parallelism and checkpoints treat them alike. What differs is what is not needed:
rows are not padded, and tokens_per_expert may lie on a GPU, where it is not read. Router,
dispatcher and shared experts are Megatron's.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections.abc import Iterator
from typing import Any, Optional

import torch

try:
    from megatron.core import tensor_parallel
    from megatron.core.activations import fast_gelu, quick_gelu, squared_relu
    from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
    from megatron.core.fusions import fused_bias_geglu
    from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.moe.moe_layer import MoESubmodules
    from megatron.core.transformer.utils import (
        ensure_metadata_has_dp_cp_group,
        make_sharded_tensors_for_checkpoint,
    )
    from megatron.core.utils import get_pg_rank, get_pg_size
except ImportError as e:
    raise ImportError(
        "moire.megatron: needs megatron-core >= 0.16 and what it needs: pip install megatron-core"
    ) from e

from .errors import invalid, unsupported
from .functional import grouped_mlp
from .groups import Groups
from .layouts import Activation, GluLayout, num_halves
from .nn import GroupedLinear, ScaledGLU
from .nn.linear import OfLayers
from .nn.mlp import fused_options
from .recipes import Recipe
from .values import described, integer

_CALL = "moire.megatron.GroupedMLP"
_RECIPES = {"mxfp8": "mxfp8", "blockwise": "fp8_block"}
_NO_LIMIT = 3e38  # of FP32
_EXTRA = "_extra_state"  # of Transformer Engine's layers, in every checkpoint of Megatron


def use_moire(spec: Any) -> Any:
    """A copy of a spec whose MoE layers have GroupedMLP for their routed experts: of a layer, a
    block, a list of layers, a stack, whatever has Megatron's MoESubmodules somewhere in it.
    """
    spec = copy.deepcopy(spec)  # some are shared by all that import them
    found = list(_moe_submodules(spec, set()))
    if not found:
        raise invalid(
            f"use_moire: {described(spec)} has no MoE layer, needs the spec of one or of what "
            "contains it, as get_gpt_layer_local_spec(num_experts=...) makes it"
        )
    for submodules in found:
        submodules.experts = GroupedMLP
    return spec


def _moe_submodules(part: Any, seen: set) -> Iterator[MoESubmodules]:
    """Those in a spec, or in what its fields and functools.partials hold."""
    if id(part) in seen or isinstance(part, type):
        return
    seen.add(id(part))
    if isinstance(part, MoESubmodules):
        yield part
    if isinstance(part, dict):
        inner = part.values()
    elif isinstance(part, (list, tuple)):
        inner = part
    elif isinstance(part, functools.partial):
        inner = (*part.args, *part.keywords.values())
    else:
        inner = vars(part).values() if dataclasses.is_dataclass(part) else ()
    for each in inner:
        yield from _moe_submodules(each, seen)


class GroupedMLP(OfLayers, MegatronModule):
    """The experts of one rank, in one call of moire.grouped_mlp: FC1, activation times the routing
    probability, FC2. What `config` asks for and moire does not do is an error that says it;
    `submodules` are not used.

    config.fp8 with fp8_recipe "mxfp8" or "blockwise" is the recipe of that name or "fp8_block"
    (moire.Recipe), on Hopper too; "hybrid" has gradients in E5M2. FC2's bias is scaled by the
    probability, as TEGroupedMLP does.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: Any,
        submodules: Any = None,
        pg_collection: Any = None,
        name: Optional[str] = None,
    ) -> None:
        super().__init__(config=config)
        self.num_local_experts = integer(f"{_CALL}: num_local_experts", num_local_experts, 1)
        if pg_collection is None:
            raise invalid(f"{_CALL}: pg_collection is absent, needs Megatron's process groups")
        _check(config, pg_collection)
        layout = GluLayout.of("halves" if config.gated_linear_unit else "ungated")
        self.activation = ScaledGLU(activation_of(config), layout)
        latent = getattr(config, "moe_latent_size", None)
        hidden, width = latent or config.hidden_size, config.moe_ffn_hidden_size
        of_both = {"config": config, "pg_collection": pg_collection, "recipe": recipe_of(config)}
        outputs = num_halves(layout.fields) * width
        self.linear_fc1 = _Linear(
            (num_local_experts, hidden, outputs), "column", config.init_method, **of_both
        )
        self.linear_fc1.glu_layout = layout if config.gated_linear_unit else None
        self.linear_fc2 = _Linear(
            (num_local_experts, width, hidden), "row", config.output_layer_init_method, **of_both
        )

    def forward(
        self,
        permuted_local_hidden_states: torch.Tensor,
        tokens_per_expert: torch.Tensor,
        permuted_probs: torch.Tensor,
        output_buffer: Optional[torch.Tensor] = None,
        grad_input_buffer: Optional[torch.Tensor] = None,
    ) -> tuple[torch.Tensor, None]:
        """The rows [rows, H] of each expert one behind the other, tokens_per_expert [E], probs
        [rows]: (the rows' outputs, None). Buffers are written instead of new memory.
        """
        x, probs = permuted_local_hidden_states, permuted_probs
        for layer in (self.linear_fc1, self.linear_fc2):
            layer.begin()
        if self.config.moe_apply_probs_on_input:
            x, probs = (probs.unsqueeze(-1) * x).to(x.dtype), None
        groups = Groups(splits=tokens_per_expert, capacity=x.shape[0])
        options = fused_options(self.linear_fc1, self.activation, self.linear_fc2, None)
        if probs is None:
            options["b2_scale"] = None
        # Detached: a dispatcher has the same memory in each step, whose graphs are none of it.
        out = None if output_buffer is None else output_buffer.detach()
        buffers = {"out": out, "grad_x_out": grad_input_buffer}
        return grouped_mlp(x, groups=groups, probs=probs, **options, **buffers), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: Optional[dict] = None
    ) -> dict:
        """For torch's and Megatron's distributed checkpoints: keys and shards of TEGroupedMLP and
        SequentialMLP, of any number of ranks.
        """
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        apart, found = metadata.get("singleton_local_shards", False), {}
        for name, layer in (("linear_fc1", self.linear_fc1), ("linear_fc2", self.linear_fc2)):
            shards = layer.sharded_state_dict(f"{name}.", sharded_offsets, metadata)
            old, new = ("", "experts.") if apart else (f"{name}.", f"experts.{name}.")
            replace_prefix_for_sharding(shards, old, prefix + new)
            found.update((prefix + key, shard) for key, shard in shards.items())
        return found


class _Linear(GroupedLinear):
    """One layer of a rank's experts: of its width, the part of this rank's tensor parallelism,
    whose sums the token dispatcher makes.
    """

    def __init__(self, sizes, parallel_mode, init_method, config, pg_collection, recipe):
        self.parallel_mode, self.pg_collection = parallel_mode, pg_collection
        of_experts = config.expert_tensor_parallel_size != config.tensor_model_parallel_size
        self.is_reduced_apart = of_experts or config.expert_model_parallel_size > 1
        (experts, inputs, outputs), parts = sizes, get_pg_size(pg_collection.expt_tp)
        inputs, outputs = (
            (inputs, _part(outputs, parts))
            if parallel_mode == "column"
            else (_part(inputs, parts), outputs)
        )
        tracker = tensor_parallel.get_cuda_rng_tracker
        delays = getattr(config, "overlap_dispatch_backward_with_experts_wgrad", False)
        super().__init__(
            experts,
            inputs,
            outputs,
            bias=config.add_bias_linear,
            packed=False,
            init_method=init_method if config.perform_initialization else _leave,
            bias_init=torch.nn.init.zeros_,
            get_rng_state_tracker=tracker if tracker().is_initialized() else None,
            rng_tracker_name=tensor_parallel.random.get_expert_parallel_rng_tracker_name(),
            device=_device(config),
            dtype=config.params_dtype,
            recipe=recipe,
            accumulate_into_main_grad=config.gradient_accumulation_fusion,
            delay_wgrad_compute=config.delay_wgrad_compute or delays,
        )
        self.is_first_microbatch = True  # Megatron sets it

    def _note_weights(self):
        """What Megatron's optimizers and data parallelism read of parameters, on new ones too."""
        super()._note_weights()
        for name, param in self._parameters.items():
            if param is None:
                continue
            param.allreduce = not self.is_reduced_apart
            param.tensor_model_parallel = (
                name.startswith("weight") or self.parallel_mode == "column"
            )
            if param.tensor_model_parallel:
                param.partition_dim = 1 if self.parallel_mode == "row" else 0
                param.partition_stride = 1

    def begin(self):
        """What a call of the layer itself would do first: hooks, of which one call for both layers
        can run those that come before (data parallelism gathers parameters in them), and whether
        the weights were written in a way that nobody counts, which Megatron says.
        """
        if any((self._forward_hooks, self._backward_hooks, self._backward_pre_hooks)):
            raise unsupported(
                f"{_CALL}: {type(self).__name__} has hooks that run after it or in its backward, "
                "which one call for both layers would pass by; give them to the GroupedMLP"
            )
        for key, hook in self._forward_pre_hooks.items():
            takes_keywords = key in self._forward_pre_hooks_with_kwargs
            if hook(self, (), *([{}] if takes_keywords else [])) is not None:
                raise unsupported(f"{_CALL}: a forward pre-hook changes what a layer is given")
        if self.is_first_microbatch:
            self.weights_changed()
        self.is_first_microbatch = False

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """Each expert's tensors; which of all experts it is says another axis, or its key."""
        metadata, groups, found = ensure_metadata_has_dp_cp_group(metadata), self.pg_collection, {}
        apart = metadata.get("singleton_local_shards", False)
        of_groups = {"tp_group": groups.expt_tp, "dp_cp_group": metadata["dp_cp_group"]}
        axis = {"weight": 0, "bias": 0} if self.parallel_mode == "column" else {"weight": 1}
        first = get_pg_rank(groups.ep) * self.num_groups
        of_all = get_pg_size(groups.ep) * self.num_groups
        for i in range(self.num_groups):
            offsets, key = (*sharded_offsets, (len(sharded_offsets), first + i, of_all)), prefix
            if apart:
                offsets, key = sharded_offsets, f"{first + i}.{prefix}"
            tensors = {n: getattr(self, f"{n}{i}") for n in ("weight", "bias")[: 1 + self.has_bias]}
            tensors[_EXTRA] = torch.empty(0, dtype=torch.uint8)  # what others without FP8 save
            shards = make_sharded_tensors_for_checkpoint(tensors, "", axis, offsets, **of_groups)
            replace_prefix_for_sharding(shards, "", key)
            for name, shard in shards.items():
                is_cut = getattr(shard, "is_data_parallel_fully_shard", False)
                of_data = 0 if is_cut else get_pg_rank(groups.expt_dp)
                shard.replica_id = (*shard.replica_id[:2], of_data)
                if self.glu_layout is not None and name != _EXTRA:
                    shard = _halves(shard, offsets, apart, of_groups)
                found[f"{prefix}{name}{'' if (name, i) == (_EXTRA, 0) else i}"] = shard
        return found

    def _load_from_state_dict(self, state_dict, prefix, *args):
        for i in range(1, self.num_groups):  # the first is GroupedLinear's to drop
            state_dict.pop(f"{prefix}{_EXTRA}{i}", None)
        super()._load_from_state_dict(state_dict, prefix, *args)


def _halves(shard, offsets, apart, groups):
    """Gate and up as two shards, which other numbers of ranks can cut."""
    takes = inspect.signature(apply_swiglu_sharded_factory).parameters  # groups: since 0.17
    given = {"tp_group": groups["tp_group"], "dp_group": groups["dp_cp_group"]}
    given = {name: group for name, group in given.items() if name in takes}
    return apply_swiglu_sharded_factory(shard, offsets, apart, **given)


def activation_of(config: Any) -> Activation:
    """That of Megatron's config, gated or alone."""
    function, gated = config.activation_func, config.gated_linear_unit
    limit = getattr(config, "activation_func_clamp_value", None)
    offset = getattr(config, "glu_linear_offset", 0.0)
    alpha = {
        torch.nn.functional.silu: 1.0,
        quick_gelu: 1.702,
        fused_bias_geglu.quick_gelu: 1.702,  # GPT-OSS has this one
    }.get(function)
    is_plain = limit is None and offset == 0
    if gated and alpha is not None and not (is_plain and alpha == 1):
        return Activation.clamped_swiglu(_NO_LIMIT if limit is None else limit, alpha, offset)
    kinds = {torch.nn.functional.silu: "swiglu", torch.nn.functional.relu: "reglu"}
    kinds.update({squared_relu: "reglu2", fast_gelu: "geglu_tanh"})
    is_tanh = isinstance(function, functools.partial) and (
        function.func is torch.nn.functional.gelu and function.keywords == {"approximate": "tanh"}
    )
    kind = "geglu_tanh" if is_tanh else kinds.get(function)
    if kind is None or not (is_plain or (limit is None and not gated)):
        found = getattr(function, "__name__", repr(function))
        raise unsupported(
            f"{_CALL}: activation_func is {found}, {'gated' if gated else 'without a gate'}, with "
            f"activation_func_clamp_value {limit} and glu_linear_offset {offset}; needs silu or, "
            "gated, quick_gelu, with these, or relu, squared_relu, fast_gelu or gelu with "
            "approximate='tanh', without them"
        )
    return Activation.of(kind)


def recipe_of(config: Any) -> Recipe:
    """What products read: config.fp8 and fp8_recipe."""
    if not config.fp8:
        return Recipe()
    name = str(getattr(config.fp8_recipe, "value", config.fp8_recipe))
    if name not in _RECIPES:
        raise unsupported(
            f"{_CALL}: fp8_recipe is {name!r}, needs {' or '.join(map(repr, _RECIPES))}"
        )
    gradients = "e5m2" if config.fp8 == "hybrid" else "e4m3"
    return Recipe(_RECIPES[name], gradient_element=gradients)


def _check(config, pg_collection):
    """That the config asks for nothing else."""
    offloads = getattr(config, "fine_grained_activation_offloading", False)
    offloaded = set(getattr(config, "offload_modules", None) or ()) if offloads else set()
    rematerialised = getattr(pg_collection, "expt_gtp_remat", None)
    parts = get_pg_size(pg_collection.expt_tp)
    for is_asked, found in (
        (config.fp4, "fp4"),
        (config.fp8 and config.fp8_param, "fp8_param"),
        (config.fp8 and config.first_last_layers_bf16, "first_last_layers_bf16"),
        (getattr(config, "quant_recipe", None), "quant_recipe"),
        (config.activation_func_fp8_input_store, "activation_func_fp8_input_store"),
        (offloaded & {"expert_fc1", "moe_act", "fused_group_mlp"}, "offloaded activations"),
        (rematerialised and get_pg_size(rematerialised) > 1, "weights spread over expt_gtp_remat"),
        (
            config.moe_apply_probs_on_input and config.moe_router_topk != 1,
            "moe_apply_probs_on_input with a moe_router_topk other than 1",
        ),
        (
            getattr(config, "transformer_impl", "") == "inference_optimized",
            "transformer_impl 'inference_optimized'",
        ),
        (getattr(config, "moe_single_grouped_weight", False), "moe_single_grouped_weight"),
        (getattr(config, "moe_single_grouped_bias", False), "moe_single_grouped_bias"),
        (getattr(config, "moe_mlp_glu_interleave_size", None), "moe_mlp_glu_interleave_size"),
        (config.add_bias_linear and parts > 1, "add_bias_linear with expert tensor parallelism"),
    ):
        if is_asked:
            raise unsupported(
                f"{_CALL}: the config has {found}, which moire does not do; needs it off, or "
                "Megatron's own TEGroupedMLP"
            )


def _part(width, parts):
    if width % parts:
        raise invalid(f"{_CALL}: {width} features cannot be divided by {parts} ranks")
    return width // parts


def _device(config):
    if config.use_cpu_initialization:
        return "cpu"
    if getattr(config, "init_model_with_meta_device", False):
        return "meta"
    return torch.device("cuda", torch.cuda.current_device())


def _leave(tensor):
    """config.perform_initialization is off."""
