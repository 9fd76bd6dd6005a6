"""The judge of emitted code, on code written by hand, and on one small step that is emitted."""

from __future__ import annotations

import textwrap

import pytest
import torch
import torch.distributed as dist

import fsdp2
from benchmarks.compiled.compile import look
from benchmarks.kit import noop
from benchmarks.kit.models import Size, build, make_input, make_step
from tests.kit.emitted import Step, emitted_by, emitted_step, read_step, stubbed_kernels
from tests.kit.emitted_kernels import read_kernel
from tests.kit.slow import with_slow

HEAD = """
aten = torch.ops.aten
reinterpret_tensor = torch._C._dynamo.guards._reinterpret_tensor
async_compile = AsyncCompile()

cpp_copy = async_compile.cpp_pybinding(['const float*', 'float*'], r'''
extern "C" void kernel(const float* in_ptr0, float* out_ptr0)
{
    for(int64_t x0=static_cast<int64_t>(0L); x0<static_cast<int64_t>(64L); x0+=static_cast<int64_t>(1L))
    {
        auto tmp0 = in_ptr0[static_cast<int64_t>(x0)];
        out_ptr0[static_cast<int64_t>(x0)] = tmp0;
    }
}
''')
"""  # noqa: E501  # as it is emitted


def module(arguments: dict[str, tuple[int, ...]], body: str, functions: str = "") -> str:
    """Return the text of an emitted module, of which ``body`` is what ``call`` does."""
    names = ", ".join(arguments)
    lines = [f"{names}, = args", "args.clear()", *textwrap.dedent(body).strip().splitlines()]
    call = textwrap.indent("\n".join(["def call(self, args):", *(f"    {x}" for x in lines)]), "  ")
    made = [
        f"    {name} = rand_strided({size}, {torch.empty(size).stride()}, device='cpu', "
        "dtype=torch.float32)"
        for name, size in arguments.items()
    ]
    get_args = "\n".join(["def get_args():", *made, f"    return [{names}]"])
    return "\n".join([HEAD, textwrap.dedent(functions), "class Runner:", call, get_args])


def lines(step: Step, *kinds: str) -> list[str]:
    events = (*step.forward, *step.backward)
    return [str(event) for event in events if not kinds or event.kind in kinds]


def test_a_wait_ends_the_collectives_in_flight_on_its_memory() -> None:
    code = module(
        {"primals_1": (16,), "primals_2": (4, 4)},
        """
        buf0 = torch.ops._c10d_functional.all_gather_into_tensor.default(primals_1, 4, '0')
        assert_size_stride(buf0, (64, ), (1, ), 'all_gather')
        buf1 = empty_strided_cpu((4, 4), (4, 1), torch.float32)
        extern_kernels.mm(primals_2, primals_2, out=buf1)
        buf2 = reinterpret_tensor(buf0, (8, 8), (8, 1), 0); del buf0  # reuse
        torch.ops._c10d_functional.wait_tensor.default(buf2)
        buf3 = torch.ops._c10d_functional.reduce_scatter_tensor.default(
            reinterpret_tensor(buf2, (64, ), (1, ), 0), 'avg', 4, '0')
        buf4 = torch.ops._c10d_functional.wait_tensor.default(buf3)
        torch.ops._c10d_functional.all_reduce_.default(buf1, 'sum', '0')
        return (buf4, buf1, )
        """,
    )
    step = read_step([code])
    assert lines(step, "issue", "wait", "compute") == [
        "issue all_gather 256 B float32 #0",
        "compute mm 64 B 128 flop",
        "wait #0",
        "issue reduce_scatter 256 B float32 #1",
        "wait #1",
        "issue all_reduce 64 B float32 #2",
    ]
    assert step.overlapped_share == 1 / 3
    assert [str(one) for one in step.exceptions] == [
        "forward: issue reduce_scatter 256 B float32 #1, 0 products (0 flop) beside it",
        "forward: issue all_reduce 64 B float32 #2, 0 products (0 flop) beside it, never awaited",
    ]


def test_coalesced_collectives_are_one_and_write_into_what_is_there() -> None:
    code = module(
        {"primals_1": (4,), "primals_2": (2,)},
        """
        buf0 = torch.ops._c10d_functional.all_gather_into_tensor_coalesced.default(
            [primals_1, primals_2], 2, '0')
        buf1 = buf0[0]
        buf2 = buf0[1]
        del buf0
        buf3 = empty_strided_cpu((8, ), (1, ), torch.float32)
        torch.ops._c10d_functional.all_gather_into_tensor_out.default(primals_1, 2, '0', out=buf3)
        torch.ops._c10d_functional.wait_tensor.default(buf2)
        torch.ops._c10d_functional.wait_tensor.default(buf1)
        torch.ops._c10d_functional.wait_tensor.default(buf3)
        return (buf1, buf2, buf3, )
        """,
    )
    step = read_step([code])
    assert lines(step, "issue", "wait") == [
        "issue all_gather_coalesced 48 B float32 #0",
        "issue all_gather 32 B float32 #1",
        "wait #0",
        "wait #0",
        "wait #1",
    ]
    assert step.peak_nbytes == 48 + 32


def test_memory_lives_as_long_as_a_view_or_a_collective_needs_it() -> None:
    code = module(
        {"primals_1": (64,)},
        """
        buf0 = empty_strided_cpu((64, ), (1, ), torch.float32)
        cpp_copy(primals_1, buf0)
        buf1 = torch.ops._c10d_functional.reduce_scatter_tensor.default(buf0, 'sum', 2, '0')
        del buf0
        buf2 = empty_strided_cpu((32, ), (1, ), torch.float32)
        buf3 = reinterpret_tensor(buf2, (4, ), (1, ), 8)
        del buf2
        torch.ops._c10d_functional.wait_tensor.default(buf1)
        del buf3
        return (buf1, )
        """,
    )
    step = read_step([code], model_nbytes=512)
    assert lines(step) == [
        "alloc 256 B",
        "copy cpp_copy 256 B",
        "alloc 128 B",
        "issue reduce_scatter 256 B float32 #0",
        "alloc 128 B",
        "wait #0",
        "free 256 B",
        "free 128 B",
    ]
    assert step.peak_nbytes == 512
    assert step.passes("copy") == 0.5


def test_what_forward_saved_is_freed_in_backward() -> None:
    forward = module(
        {"primals_1": (8,)},
        """
        buf0 = empty_strided_cpu((8, ), (1, ), torch.float32)
        buf1 = empty_strided_cpu((16, ), (1, ), torch.float32)
        return (buf0, primals_1, reinterpret_tensor(buf1, (4, 4), (4, 1), 0), )
        """,
    )
    backward = module(
        {"primals_1": (8,), "mm": (4, 4), "tangents_1": (8,)},
        """
        del primals_1
        buf0 = aten.clone.default(tangents_1)
        del tangents_1
        del mm
        return (buf0, )
        """,
    )
    step = read_step([forward, backward])
    assert step.kept_nbytes == 32 + 64
    assert lines(step)[2:] == [
        "alloc 32 B",  # a tangent
        "free 32 B",  # the output
        "alloc 32 B",
        "copy aten.clone.default 32 B",
        "free 32 B",
        "free 64 B",
    ]


def test_subgraphs_are_walked_through_at_each_call() -> None:
    code = module(
        {"primals_1": (4, 4)},
        """
        buf0 = [None] * 1
        subgraph_0_args = [primals_1]
        buf0 = subgraph_0(subgraph_0_args)
        buf1 = buf0[0]
        del buf0
        subgraph_0_args = [buf1]
        buf2 = subgraph_0(subgraph_0_args)
        return (buf2[0], )
        """,
        """
        def subgraph_0(args):
            arg0_1, = args
            args.clear()
            buf0 = empty_strided_cpu((4, 4), (4, 1), torch.float32)
            extern_kernels.addmm(arg0_1, arg0_1, arg0_1, alpha=1, beta=1, out=buf0)
            return (buf0, )
        """,
    )
    assert lines(read_step([code]), "compute") == ["compute addmm 64 B 128 flop"] * 2


def test_calls_are_copies_casts_compute_or_unknown() -> None:
    code = module(
        {"primals_1": (4, 4)},
        """
        buf0 = torch.ops.aten.cat.default([primals_1, primals_1], 1)
        buf1 = aten._to_copy.default(buf0, dtype=torch.bfloat16)
        buf2 = aten.view.dtype(buf1, torch.uint8)
        buf3 = aten.copy_.default(primals_1, primals_1)
        buf4 = aten.bmm.default(aten.unsqueeze.default(primals_1, 0),
                                aten.unsqueeze.default(primals_1, 0))
        buf5 = torch.ops.somewhere.does_something.default(buf2)
        return (buf5, )
        """,
    )
    step = read_step([code])
    assert lines(step, "copy", "cast", "compute", "unknown") == [
        "copy aten.cat.default 128 B",
        "cast aten._to_copy.default 64 B",
        "copy aten.copy_.default 64 B",
        "compute aten.bmm.default 64 B 128 flop",
        "unknown somewhere.does_something.default 64 B",
    ]
    assert step.unknown == ["somewhere.does_something.default"]


def loop(statements: str, *, source: str = "float", target: str = "float") -> str:
    return f"""
extern "C" void kernel(const {source}* in_ptr0, const float* in_ptr1, {target}* out_ptr0)
{{
    #pragma GCC ivdep
    for(int64_t x0=static_cast<int64_t>(0L); x0<static_cast<int64_t>(8L); x0+=static_cast<int64_t>(1L))
    {{
        {{
            {statements}
        }}
    }}
}}
"""  # noqa: E501


COPIES = (
    loop("auto tmp0 = in_ptr0[x0]; out_ptr0[x0] = tmp0;"),
    loop(  # there and back
        """auto tmp0 = in_ptr0[x0];
        auto tmp1 = c10::convert<float>(tmp0);
        auto tmp2 = c10::convert<at::BFloat16>(tmp1);
        out_ptr0[x0] = tmp2;""",
        source="at::BFloat16",
        target="at::BFloat16",
    ),
    loop(  # a piece, zeros, another piece
        """auto tmp0 = x0;
        auto tmp1 = static_cast<int64_t>(5);
        auto tmp2 = tmp0 < tmp1;
        auto tmp3 = [&] { auto tmp4 = in_ptr0[x0]; return tmp4; };
        auto tmp5 = tmp2 ? tmp3() : static_cast<decltype(tmp3())>(0.0);
        auto tmp6 = in_ptr1[x0 + 3L];
        auto tmp7 = tmp2 ? tmp5 : tmp6;
        out_ptr0[x0] = tmp7;"""
    ),
    loop(
        """auto tmp0 = at::vec::Vectorized<float>::loadu(in_ptr0 + static_cast<int64_t>(x0), 16);
        tmp0.store(out_ptr0 + static_cast<int64_t>(x0));"""
    ),
)
CASTS = (
    loop(
        """auto tmp0 = in_ptr0[x0];
        auto tmp1 = c10::convert<float>(tmp0);
        out_ptr0[x0] = tmp1;""",
        source="at::BFloat16",
    ),
    loop(
        """auto tmp0 = at::vec::VectorizedN<float,2>::loadu(in_ptr0 + 2L*x0, 32);
        auto tmp1 = at::vec::convert<at::BFloat16,1,float,2>(tmp0);
        tmp1.store(out_ptr0 + static_cast<int64_t>(x0), static_cast<int64_t>(32));""",
        target="at::BFloat16",
    ),
)
FILLS = (loop("auto tmp0 = static_cast<float>(0.0); out_ptr0[x0] = tmp0;"),)
COMPUTE = (
    loop("auto tmp0 = in_ptr0[x0]; auto tmp1 = tmp0 + tmp0; out_ptr0[x0] = tmp1;"),
    loop("auto tmp0 = in_ptr0[x0]; out_ptr0[x0] = std::exp(tmp0);"),
    loop("auto tmp0 = in_ptr0[x0]; atomic_add(&out_ptr0[x0], tmp0);"),
    loop(  # a look-up
        """auto tmp0 = in_ptr1[x0];
        auto tmp1 = in_ptr0[8L*tmp0];
        out_ptr0[x0] = tmp1;"""
    ),
    loop(
        """auto tmp3 = [&] { auto tmp4 = in_ptr0[x0]; auto tmp5 = tmp4 * tmp4; return tmp5; };
        auto tmp6 = x0 ? tmp3() : static_cast<decltype(tmp3())>(0.0);
        out_ptr0[x0] = tmp6;"""
    ),
    loop(
        """auto tmp0 = at::vec::Vectorized<float>::loadu(in_ptr0 + x0, 16);
        auto tmp1 = tmp0.exp();
        tmp1.store(out_ptr0 + x0);"""
    ),
)


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        *(("copy", code) for code in COPIES),
        *(("cast", code) for code in CASTS),
        *(("fill", code) for code in FILLS),
        *(("compute", code) for code in COMPUTE),
    ],
)
def test_a_store_is_what_its_value_is(kind: str, code: str) -> None:
    (store,) = read_kernel("k", code, "cpp").stores
    assert (store.kind, store.argument, store.numel) == (kind, 2, 8)


def test_a_body_and_its_remainder_are_one_store_and_loops_beside_each_other_two() -> None:
    twice = "if(x0 < 4) { auto tmp0 = in_ptr0[x0]; out_ptr0[x0] = tmp0; }" * 2
    code = loop(twice)
    assert [store.numel for store in read_kernel("k", code, "cpp").stores] == [8]
    head, brace, body = loop("auto tmp0 = in_ptr0[x0]; out_ptr0[x0] = tmp0;").partition("{")
    two = head + brace + body.rstrip().removesuffix("}") * 2 + "}"
    assert [store.numel for store in read_kernel("k", two, "cpp").stores] == [8, 8]


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("copy", "tmp0"),
        ("copy", "tl.where(xindex < 5, tmp0, 0.0)"),
        ("cast", "tmp0.to(tl.float32)"),
        ("compute", "tmp0 + tmp0"),
        ("compute", "tl.sigmoid(tmp0)"),
        ("fill", "tl.full([XBLOCK], 1.0, tl.float32)"),
    ],
)
def test_stores_of_triton_are_read_too(kind: str, value: str) -> None:
    code = f"""
import triton
import triton.language as tl

@triton.jit
def triton_poi_fused_0(in_ptr0, out_ptr0, xnumel, XBLOCK : tl.constexpr):
    xindex = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[:]
    x0 = xindex
    tmp0 = tl.load(in_ptr0 + (x0), xindex < xnumel)
    tmp1 = {value}
    tl.store(out_ptr0 + (x0), tmp1, xindex < xnumel)
"""
    (store,) = read_kernel("k", code, "triton").stores
    assert (store.kind, store.argument) == (kind, 1)


@pytest.mark.parametrize("bf16", with_slow([False, True], [True]))
def test_a_step_that_is_emitted_has_the_collectives_of_its_groups(bf16: bool) -> None:
    size = Size(depth=1, width=32, hidden=32, vocabulary=64)
    step = emitted_step(3, bf16=bf16, size=size)
    assert not dist.is_initialized()
    kinds = [(one.graph, one.event.name.removesuffix("_coalesced")) for one in step.collectives]
    assert sorted(kinds) == [  # of a block, an embedding and a head
        *[("backward", "all_gather")],
        *[("backward", "reduce_scatter")] * 3,
        *[("forward", "all_gather")] * 3,
    ]
    gathered = [one.event for one in step.collectives if "all_gather" in one.event.name]
    assert {event.dtype for event in gathered} == {"bfloat16" if bf16 else "float32"}
    forward = sum(event.nbytes for event in gathered[:3])
    assert step.model_nbytes <= forward < 1.05 * step.model_nbytes
    assert all(one.awaited for one in step.collectives)
    assert step.unknown == []
    assert (step.cast_nbytes > 0) == bf16
    assert step.peak_nbytes > step.model_nbytes / 3


@pytest.mark.slow
def test_the_peak_of_the_code_is_that_of_the_allocator() -> None:
    """In fp32: products in bf16 may take memory of their own inside, which no code shows."""
    size = Size(depth=2, width=32, hidden=64, vocabulary=64)
    with noop.ranks(2) as (_, mesh):
        model = build("fsdp2", size, mesh, bf16=False)
        compiled = fsdp2.compile(model, fullgraph=True)
        x = make_input("fsdp2", size, bf16=False)
        step = read_step(emitted_by(make_step(compiled, x)))
        with stubbed_kernels():
            make_step(compiled, x)()
            found = look(compiled, x)
    torch._dynamo.reset()
    assert step.peak_nbytes == pytest.approx(found.peak_nbytes, abs=64)
