"""Calls by invoke.cpp and by cffi: the same structs, results and errors."""

import contextlib
import pathlib
import resource
import struct
import sys
import threading

import moire
import numpy as np
import pytest
import torch
from moire import _abi, invoke, wgrad
from moire._abi import extension, ffi, lib
from moire.arrays import Torch

WAYS = ["compiled", "cffi"]


@pytest.fixture(autouse=True)
def is_there():
    if invoke.compiled_for is None:
        pytest.skip("invoke.cpp was not built, or this Torch has no DLPack C exchange API")


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    """Both ways; what the compiled one declined goes on by cffi."""
    taken = []
    if request.param == "cffi":
        monkeypatch.setattr(invoke, "compiled_for", None)
    filled = invoke._filled

    def watched(*args):
        taken.append(args[0])
        return filled(*args)

    monkeypatch.setattr(invoke, "_filled", watched)
    return request.param, taken


def by_both(monkeypatch, call):
    """What each way returns, or its error."""
    found = []
    for fw in (Torch, None):
        monkeypatch.setattr(invoke, "compiled_for", fw)
        try:
            found.append(call())
        except moire.Error as e:
            found.append((type(e), e.code, str(e)))
    return found


def random_values(entry, pick, listed):
    """A value for every keyword of an entry."""

    def tensor(*shape, dtype=torch.float32):
        return torch.zeros(shape, dtype=dtype)

    makers = {
        "moire_tensor": lambda: tensor(*(pick(1, 5) for _ in range(pick(1, 3)))),
        "moire_prepared_weight": lambda: tensor(pick(1, 9), dtype=torch.uint8),
        "moire_quantized": lambda: [tensor(2, 4), tensor(2, 1, dtype=torch.uint8)],
        "moire_weight": lambda: [tensor(2, 4) for _ in range(3)] if listed else [tensor(3, 2, 4)],
        "moire_activation": lambda: (1.0, 7.0, 1.5, pick(0, 4) / 2),
        "moire_glu_layout": lambda: (pick(0, 64), 1),
        "form": lambda: [pick(-5, 2**31 - 1) for _ in range(11)],
        "uint8_t *": lambda: tensor(3, dtype=torch.uint8),
        "int64_t *": lambda: tensor(4, dtype=torch.int64),
        "moire_offsets_output *": lambda: [tensor(4, dtype=torch.int32) for _ in range(11)],
        "flags": lambda: [pick(0, 1) for _ in range(11)],
        "int32_t": lambda: pick(-3, 3),
        "int64_t": lambda: pick(-(2**62), 2**62),
        "float": lambda: pick(0, 100) / 7,
    }
    values = {key: makers[kind]() for key, kind in entry.kinds.items()}
    values.update((k, value[:8]) for k, value in values.items() if k.startswith("outputs"))
    return {**values, "num_groups": 3, "num_outputs": 8}


def read(name, pointer):
    """A copy of the struct at an address, and what its pointers into the call's own memory lead
    to.
    """
    args, found = ffi.new(f"moire_{name}_args *"), []
    ffi.memmove(args, pointer, ffi.sizeof(args[0]))
    for field, member in ffi.typeof(args[0]).fields:
        value = getattr(args, field)
        if member.type.cname == "moire_weight" and value.list != ffi.NULL:
            found.append(list(value.list[0 : value.tensor.shape[0]]))
            value.list = ffi.NULL
        if member.type.cname == "moire_offsets_output *" and value != ffi.NULL:
            size = args.num_outputs * ffi.sizeof("moire_offsets_output")
            found.append(bytes(ffi.buffer(value, size)))
            setattr(args, field, ffi.NULL)
    return bytes(ffi.buffer(args)), found


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("name", sorted(invoke.ENTRIES))
def test_every_field_is_written_alike(name, listed, generator):
    seen = []

    @ffi.callback("int32_t(void *, void *)")
    def function(context, args):
        seen.append(read(name, args))
        return 0

    def pick(least, most):
        return int(torch.randint(least, most + 1, (), generator=generator))

    entry = invoke.Entry(name)
    values = random_values(entry, pick, listed)
    _, args, alive = invoke._filled(name, values, Torch, False)
    expected = read(name, args)
    assert alive is not None and len(set(expected[0])) > 8
    entry.function, entry.workspace = function, None
    assert invoke.compiled.call(entry.compile(extension()), values) == 0
    assert seen == [expected]


@pytest.mark.parametrize("name", sorted(invoke.ENTRIES))
def test_what_is_absent_is_zero(name):
    entry = invoke.Entry(name)
    seen = []

    @ffi.callback("int32_t(void *, void *)")
    def function(context, args):
        seen.append(read(name, args))
        return 7

    arrays = ("moire_tensor", "moire_quantized", "moire_weight")
    key, kind = next((k, kind) for k, kind in entry.kinds.items() if kind in arrays)
    tensor = torch.zeros(2, 3, 4)
    values = dict.fromkeys(entry.kinds)
    values.update((k, []) for k, kind in entry.kinds.items() if kind == "moire_weight")
    values.update((k, ()) for k, kind in entry.kinds.items() if kind == "moire_activation")
    array = {"moire_tensor": tensor, "moire_quantized": [tensor, tensor], "moire_weight": [tensor]}
    values.update({key: array[kind], "of another entry": 1})
    _, args, alive = invoke._filled(name, values, Torch, False)
    entry.function, entry.workspace = function, None
    assert invoke.compiled.call(entry.compile(extension()), values) == 7
    assert seen == [read(name, args)] and alive is not None


def test_plain_tensors_need_no_cffi(way, generator):
    name, taken = way
    x = torch.randn(5, 4, generator=generator, requires_grad=True)
    w1, w2 = torch.randn(2, 6, 4, generator=generator), torch.randn(2, 4, 3, generator=generator)
    groups = moire.Groups(splits=[2, 3])
    moire.grouped_mlp(x, torch.nn.Parameter(w1), w2, groups).backward(torch.ones(5, 4))
    moire.grouped_mlp(x, list(w1), list(w2), groups)
    entries = ["splits_to_offsets", "grouped_mlp", "grouped_mlp_backward", "grouped_mlp"]
    assert taken == ([] if name == "compiled" else entries)


STRANGE = {
    "transposed": lambda x: x.t().contiguous().t(),
    "columns of more": lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
    "expanded": lambda x: x[:1].expand(x.shape),
    "a subclass": lambda x: x.as_subclass(type("Own", (torch.Tensor,), {})),
    "negated": lambda x: torch._neg_view(-x),
    "zeros without memory": lambda x: torch._efficientzerotensor(x.shape),
}


@pytest.mark.parametrize("what", STRANGE)
def test_what_is_not_plain_goes_by_cffi(what, way, generator):
    taken = way[1]
    x, w = torch.randn(5, 4, generator=generator), torch.randn(2, 3, 4, generator=generator)
    groups = moire.Groups(splits=[2, 3])
    taken.clear()
    strange = STRANGE[what](x)
    y = moire.grouped_linear(strange, w, groups)
    assert taken == ["grouped_linear"] * (2 if what == "a subclass" else 1)  # the dispatcher asks
    plain = strange.as_subclass(torch.Tensor).resolve_neg().clone()
    torch.testing.assert_close(
        y.as_subclass(torch.Tensor), torch.cat([plain[:2] @ w[0].T, plain[2:] @ w[1].T])
    )


WRONG = {
    "an output of rows apart": {"y": torch.zeros(5, 6)[:, ::2]},
    "a type": {"x": torch.zeros(5, 4, dtype=torch.complex64)},
    "another device": {"y": torch.zeros(5, 3, device="meta")},
    "a NumPy array": {"y": np.zeros((5, 3), np.float32)},
    "a rank": {"x": torch.zeros(1, 1, 5, 4)},
    "no rank": {"x": torch.zeros(())},
    "few offsets": {"offsets": torch.zeros(2, dtype=torch.int64)},
    "short offsets": {"offsets": torch.zeros(3, dtype=torch.int32)},
    "a list of two shapes": {"w": [torch.zeros(3, 4), torch.zeros(4, 3)]},
    "a list of two types": {"w": [torch.zeros(3, 4), torch.zeros(3, 4).bfloat16()]},
    "what C refuses": {"w": [torch.zeros(2, 3, 5)]},
    "a capacity": {"capacity": -1},
}


@pytest.mark.parametrize("what", WRONG)
def test_errors_are_the_same(what, monkeypatch):
    values = {"x": torch.zeros(5, 4), "w": [torch.zeros(2, 3, 4)], "y": torch.zeros(5, 3)}
    values.update(offsets=torch.tensor([0, 2, 5]), num_groups=2, capacity=5)
    values.update(WRONG[what])
    one, other = by_both(monkeypatch, lambda: invoke.invoke("grouped_linear", values, Torch))
    assert one == other and one[0] is moire.InvalidArgument and "grouped_linear: " in one[2]


def test_numbers_that_do_not_fit_are_the_same_error(monkeypatch):
    values = {"x": torch.zeros(5, 4), "tail": 2**40}
    for fw in (Torch, None):
        monkeypatch.setattr(invoke, "compiled_for", fw)
        with pytest.raises(struct.error, match="requires"):
            invoke.invoke("grouped_linear", values, Torch)


def test_threads_call_at_once(generator):
    x, w = torch.randn(64, 32, generator=generator), torch.randn(4, 48, 32, generator=generator)
    groups, found = moire.Groups(splits=[16] * 4), []
    expected = moire.grouped_linear(x, w, groups)

    def work():
        found.append(all(moire.grouped_linear(x, w, groups).equal(expected) for _ in range(50)))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 4


def test_no_reference_is_kept(generator):
    x, w = torch.randn(5, 4, generator=generator), torch.randn(3, 4, generator=generator)
    values = {"x": x, "w": [w, w], "y": torch.zeros(5, 3), "num_groups": 2, "capacity": 5}
    values["offsets"] = offsets = torch.tensor([0, 2, 5])
    declined = {**values, "y": torch.zeros(5, 6)[:, ::2]}
    before = [sys.getrefcount(t) for t in (x, w, offsets, values["y"], values, None, False)]
    for _ in range(100):
        invoke.invoke("grouped_linear", values, Torch)
        with pytest.raises(moire.InvalidArgument):
            invoke.invoke("grouped_linear", declined, Torch)
    after = [sys.getrefcount(t) for t in (x, w, offsets, values["y"], values, None, False)]
    assert all(abs(a - b) < 50 for a, b in zip(after, before))


@contextlib.contextmanager
def only_another(num_bytes):
    """The process gets no more memory than this."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def test_what_the_memory_of_scratch_raises_is_raised(way, monkeypatch, generator):
    rows, width = 2**20, 1024  # 4 GiB of activations
    x, w1 = torch.empty(rows, 1), torch.randn(1, 2 * width, 1, generator=generator)
    groups, w2 = moire.Groups(splits=[rows]), torch.randn(1, 1, width, generator=generator)

    def full(device, size):
        raise MemoryError(f"{size} bytes on {device}")

    monkeypatch.setattr(Torch, "scratch", full)
    with only_another(2**30), pytest.raises(MemoryError, match=r"\d{10} bytes on cpu"):
        moire.grouped_mlp(x, w1, w2, groups)
    monkeypatch.undo()
    with only_another(2**30), pytest.raises(RuntimeError, match="memory"):
        moire.grouped_mlp(x, w1, w2, groups)
    few = moire.Groups(splits=[5])
    assert moire.grouped_mlp(torch.zeros(5, 1), w1, w2, few).shape == (5, 1)


def test_a_call_runs_on_the_context_of_now():
    entry, found = invoke.Entry("grouped_mlp"), []

    @ffi.callback("int32_t(void *, void *)")
    def function(context, args):
        found.append(context)
        return 0

    def call():
        assert invoke.compiled.call(compiled, {"x": torch.zeros(2, 4)}) == 0
        assert found[-1] == moire.context.current()
        return found[-1]

    entry.function, entry.workspace = function, None
    compiled, threads = entry.compile(invoke.compiled), torch.get_num_threads()
    usual = [call() for _ in range(3)]
    with moire.strict():
        assert call() != usual[0]
    with moire.settings(num_threads=threads + 3):
        assert call() != usual[0]
    try:
        torch.set_num_threads(threads + 2)
        assert call() != usual[0]
    finally:
        torch.set_num_threads(threads)
    assert {*usual, call()} == {usual[0]}


def test_a_step_that_needs_more_scratch_than_before_gets_it():
    entry, log, needs = invoke.Entry("grouped_mlp"), [], [1000]

    @ffi.callback("int32_t(void *, void *, size_t *)")
    def workspace(context, args, size):
        log.append("asked")
        size[0] = needs[0]
        return 0

    @ffi.callback("int32_t(void *, void *)")
    def function(context, args):
        given = ffi.cast("moire_grouped_mlp_args *", args).workspace
        assert int(ffi.cast("uintptr_t", given.data)) % 256 == 0
        log.append(given.bytes)
        return lib.MOIRE_OUT_OF_MEMORY if given.bytes < needs[0] else 0

    entry.function, entry.workspace = function, workspace
    x, compiled = torch.zeros(2, 4), entry.compile(invoke.compiled)
    step = invoke.compiled.step(compiled, {"x": x}, [x])
    for needed, done in ((1000, ["asked", 1000]), (1000, [1000]), (900, [1000])):
        needs[0] = needed
        assert invoke.compiled.replay((step,), x.device, [x]) == 0 and log == done
        log.clear()
    needs[0] = 3000
    assert invoke.compiled.replay((step,), x.device, [x]) == 0
    assert log == [1000, "asked", 3000]
    log.clear()
    with moire.settings(num_threads=torch.get_num_threads() + 1):  # another context
        assert invoke.compiled.replay((step,), x.device, [x]) == 0
    assert log == ["asked", 3000]


def test_overlaps_are_found_as_by_python(generator):
    def pick(most):
        return int(torch.randint(most, (), generator=generator))

    counts = [0, 0]
    for _ in range(300):
        whole = [torch.zeros(40), torch.zeros(200, dtype=torch.uint8)]
        tensors = {}
        for i in range(2 + pick(4)):
            of = whole[pick(2)]
            begin, step = pick(len(of)), 1 + pick(3)
            tensors[f"t{i}"] = of[begin : begin + pick(12) : step]
        names = sorted(tensors)
        written = {name: tensors[name] for name in names[: 1 + pick(2)]}
        read = {name: tensors[name] for name in names if name not in written}
        wanted = wgrad._shared(written, read) is not None
        assert invoke.compiled.overlap(written, (1, None, [read])) == wanted
        counts[wanted] += 1
    assert min(counts) > 20
    one = torch.zeros(3)
    assert invoke.compiled.overlap({"a": one}, {"b": torch.nn.Parameter(one)})
    assert not invoke.compiled.overlap({"a": one}, {"b": one.to("meta").as_subclass(Other)})


class Other(torch.Tensor):
    """Whose memory is not all there is to it."""


def test_a_python_that_cannot_load_it_does_without(monkeypatch, tmp_path):
    monkeypatch.setattr(_abi, "library_path", tmp_path / "libmoire.so")
    assert extension() is None
    (tmp_path / "moire_invoke.abi3.so").write_text("no library")
    assert extension() is None
    monkeypatch.setattr("importlib.util.spec_from_file_location", lambda name, path: None)
    assert extension() is None


def test_info_says_how_calls_are_made():
    assert moire.info()["calls_of_torch"] == "invoke.cpp"
