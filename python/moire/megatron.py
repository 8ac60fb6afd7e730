"""Megatron-Core's routed experts on moire: GroupedMLP where a layer's spec has TEGroupedMLP.

    spec = get_gpt_layer_with_transformer_engine_spec(num_experts=8, moe_grouped_gemm=True)
    moire.megatron.use_moire(spec)

Parameters have TEGroupedMLP's names, shapes and attributes (`linear_fc1.weight0`, ...), so that
optimizers, data parallelism and checkpoints treat them alike. What differs is what is not needed:
rows are not padded, tokens_per_expert may lie on a GPU and is not read there, nothing is compiled
or captured at the first step. Router, dispatcher and shared experts are Megatron's.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from typing import Any, Optional

import torch

try:
    from megatron.core import tensor_parallel
    from megatron.core.activations import fast_gelu, quick_gelu, squared_relu
    from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.utils import (
        ensure_metadata_has_dp_cp_group,
        make_sharded_tensors_for_checkpoint,
    )
    from megatron.core.utils import get_pg_rank, get_pg_size
except ImportError as e:
    raise ImportError(
        "moire.megatron: needs megatron-core >= 0.16 and what it needs: pip install megatron-core"
    ) from e
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding

from .errors import invalid, unsupported
from .functional import grouped_mlp
from .groups import Groups
from .layouts import Activation, GluLayout, num_halves
from .nn import GroupedLinear, ScaledGLU
from .nn.mlp import fused_options
from .recipes import Recipe
from .values import described, integer

_CALL = "moire.megatron.GroupedMLP"
_RECIPES = {"mxfp8": "mxfp8", "blockwise": "fp8_block"}
_NO_LIMIT = 3e38  # of FP32
_EXTRA = "_extra_state"  # of Transformer Engine's layers, in every checkpoint of Megatron


def use_moire(spec: Any) -> Any:
    """The spec of a layer, or of a block of them, whose routed experts are GroupedMLP from here on:
    it is changed, and returned.
    """
    found = list(_moe_submodules(spec))
    if not found:
        raise invalid(
            f"use_moire: {described(spec)} has no MoE layer, needs the spec of a layer or block "
            "with experts, as get_gpt_layer_local_spec(num_experts=...) makes it"
        )
    for submodules in found:
        submodules.experts = GroupedMLP
    return spec


def _moe_submodules(spec: Any) -> Iterator[Any]:
    """Those of the MoE layers in a spec: of a ModuleSpec, or of a functools.partial."""
    for layer in getattr(spec, "layer_specs", None) or ():
        yield from _moe_submodules(layer)
    submodules = getattr(spec, "keywords", {}).get("submodules", getattr(spec, "submodules", None))
    if hasattr(submodules, "experts"):
        yield submodules
    elif hasattr(submodules, "mlp"):
        yield from _moe_submodules(submodules.mlp)


class GroupedMLP(MegatronModule):
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
        self.ep_group, self.tp_group = pg_collection.ep, pg_collection.expt_tp
        _check(config, pg_collection)
        block = getattr(config, "moe_mlp_glu_interleave_size", None) or 0
        layout = GluLayout(block) if config.gated_linear_unit else GluLayout.of("ungated")
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
            for hook in layer._forward_pre_hooks.values():  # data parallelism gathers parameters
                hook(layer, ())
        if self.config.moe_apply_probs_on_input:
            x, probs = (probs.unsqueeze(-1) * x).to(x.dtype), None
        groups = Groups(splits=tokens_per_expert, capacity=x.shape[0])
        options = fused_options(self.linear_fc1, self.activation, self.linear_fc2, self._is_first())
        if probs is None:
            options["b2_scale"] = None
        buffers = {"out": output_buffer, "grad_x_out": grad_input_buffer}
        return grouped_mlp(x, groups=groups, probs=probs, **options, **buffers), None

    def _is_first(self):
        """Whether 8-bit copies of the weights are made anew; None where moire finds out."""
        layers = self.linear_fc1, self.linear_fc2
        first = all(layer.is_first_microbatch for layer in layers)
        for layer in layers:
            layer.is_first_microbatch = False
        asks = layers[0].recipe.is_quantized and not self.config.disable_parameter_transpose_cache
        return first if asks else None

    def backward_dw(self) -> None:
        """The weight gradients that backward left (delay_wgrad_compute), FC2's first."""
        self.linear_fc2.backward_dw()
        self.linear_fc1.backward_dw()

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: Optional[dict] = None
    ) -> dict:
        """For torch's and Megatron's distributed checkpoints: keys and shards of TEGroupedMLP and
        SequentialMLP, of any number of ranks. Gate and up are halves there.
        """
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        if self.activation.layout.block != 0:
            raise unsupported(
                f"{_CALL}: moe_mlp_glu_interleave_size is {self.activation.layout.block}, but "
                "sharded checkpoints have gate and up in halves; needs a module without it, and "
                "moire.nn.convert_state_dict"
            )
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
        (experts, inputs, outputs), parts = sizes, get_pg_size(pg_collection.expt_tp)
        inputs, outputs = (
            (inputs, _part(outputs, parts))
            if parallel_mode == "column"
            else (_part(inputs, parts), outputs)
        )
        tracker = tensor_parallel.get_cuda_rng_tracker
        delays = getattr(config, "overlap_dispatch_backward_with_experts_wgrad", False)
        starts = (init_method, torch.nn.init.zeros_)
        if not config.perform_initialization:
            starts = (_leave, _leave)
        super().__init__(
            experts,
            inputs,
            outputs,
            bias=config.add_bias_linear,
            packed=getattr(config, "moe_single_grouped_weight", False),
            init_method=starts[0],
            bias_init=starts[1],
            get_rng_state_tracker=tracker if tracker().is_initialized() else None,
            rng_tracker_name=tensor_parallel.random.get_expert_parallel_rng_tracker_name(),
            device=_device(config),
            dtype=config.params_dtype,
            recipe=recipe,
            accumulate_into_main_grad=config.gradient_accumulation_fusion,
            delay_wgrad_compute=config.delay_wgrad_compute or delays,
        )
        self.is_first_microbatch = True  # Megatron sets it
        self._mark(config)

    def _mark(self, config):
        """What Megatron's optimizers and data parallelism read of parameters."""
        tp = config.tensor_model_parallel_size
        of_experts = config.expert_model_parallel_size > 1
        of_experts = of_experts or config.expert_tensor_parallel_size != tp
        for name, param in self.named_parameters(recurse=False):
            is_weight = name.startswith("weight")
            param.allreduce = not of_experts
            param.tensor_model_parallel = is_weight or self.parallel_mode == "column"
            if param.tensor_model_parallel:
                axis = 1 if self.parallel_mode == "row" else 0
                param.partition_dim, param.partition_stride = axis + self.packed, 1

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
            tensors = {name: self._of_experts(name)[i] for name in self._kinds}
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

    @property
    def _kinds(self):
        return ("weight", "bias") if self.has_bias else ("weight",)

    def _of_experts(self, name):
        return self._all(name)[0].unbind() if self.packed else self._all(name)


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
    alpha = {torch.nn.functional.silu: 1.0, quick_gelu: 1.702}.get(function)
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
    one_weight = getattr(config, "moe_single_grouped_weight", False)
    one_bias = getattr(config, "moe_single_grouped_bias", False)
    parts = get_pg_size(pg_collection.expt_tp)
    for is_asked, found in (
        (config.fp4, "fp4"),
        (config.fp8 and config.fp8_param, "fp8_param"),
        (config.fp8 and config.first_last_layers_bf16, "first_last_layers_bf16"),
        (getattr(config, "quant_recipe", None), "quant_recipe"),
        (config.activation_func_fp8_input_store, "activation_func_fp8_input_store"),
        (offloaded & {"expert_fc1", "moe_act", "fused_group_mlp"}, "offloaded activations"),
        (rematerialised and get_pg_size(rematerialised) > 1, "weights spread over expt_gtp_remat"),
        (config.add_bias_linear and one_bias != one_weight, "one of weights and biases grouped"),
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
