"""The reference on a grid: against Python floats and differences, with poison in dead pairs; refusals."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from fusedattn.reference import reference_attention

NAN, INF = math.nan, math.inf
FORMATS = {"bshd": (0, 1, 2, 3), "sbhd": (1, 0, 2, 3), "bhsd": (0, 2, 1, 3)}


def problem(seed: int = 0) -> tuple[Tensor, ...]:
    """q, k, v, bias, keep: B=2, Sq=3, Skv=4, H=2, D=3."""
    g = torch.Generator().manual_seed(seed)
    shapes = (2, 3, 2, 3), (2, 4, 2, 3), (2, 4, 2, 3), (1, 2, 3, 4)
    tensors = tuple(torch.randn(shape, generator=g, dtype=torch.float64) for shape in shapes)
    return (*tensors, torch.rand(2, 2, 5, 6, generator=g) > 0.3)


GRID = list(
    itertools.product(
        ("thd", *FORMATS),
        ("no_bias", "pre_scale_bias", "post_scale_bias"),
        ("no_mask", "padding", "causal"),
        (0.0, 0.25),
    )
)


def on_grid(qkv_format: str, bias_type: str, mask_type: str, dropout: float, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Results, back in bshd and [B, H, Sq]; lengths are (3, 2) and (4, 1) where they act."""
    q, k, v, bias, keep = tensors
    if qkv_format == "thd":
        q, k, v = torch.cat([q[0], q[1, :2]]), torch.cat([k[0], k[1, :1]]), torch.cat([v[0], v[1, :1]])
    else:
        q, k, v = (x.permute(FORMATS[qkv_format]) for x in (q, k, v))
    return reference_attention(
        *(q, k, v, None if bias_type == "no_bias" else bias),
        qkv_format=qkv_format,
        bias_type=bias_type,
        mask_type=mask_type,
        cu_seqlens_q=torch.tensor([0, 3, 5]),
        cu_seqlens_kv=torch.tensor([0, 4, 5]),
        attn_scale=0.7,
        dropout=dropout,
        keep=keep,
    )


def by_hand(qkv_format: str, bias_type: str, mask_type: str, dropout: float, *tensors: Tensor) -> tuple[Tensor, Tensor]:
    """The same, bshd, in Python floats."""
    q, k, v, bias, keep = (x.tolist() for x in tensors)
    out, lse = torch.zeros(2, 3, 2, 3, dtype=torch.float64), torch.full((2, 2, 3), -INF, dtype=torch.float64)
    short = qkv_format == "thd" or mask_type == "padding"
    for b, h in itertools.product(range(2), range(2)):
        len_q, len_kv = (2, 1) if short and b else (3, 4)
        for i in range(len_q):
            scores = []
            for j in range(min(i + 1, len_kv) if mask_type == "causal" else len_kv):
                dot = sum(x * y for x, y in zip(q[b][i][h], k[b][j][h], strict=True))
                pre = bias[0][h][i][j] if bias_type == "pre_scale_bias" else 0.0
                post = bias[0][h][i][j] if bias_type == "post_scale_bias" else 0.0
                scores.append(0.7 * (dot + pre) + post)
            lse[b, h, i] = math.log(sum(map(math.exp, scores)))
            for j, score in enumerate(scores):
                p = math.exp(score - lse[b, h, i]) * (keep[b][h][i][j] / (1 - dropout) if dropout else 1.0)
                out[b, i, h] += p * torch.tensor(v[b][j][h], dtype=torch.float64)
    return out, lse


@pytest.mark.parametrize("words", GRID, ids=str)
def test_grid_in_python_floats(words: tuple[str, str, str, float]) -> None:
    out, lse = on_grid(*words, *problem())
    want, want_lse = by_hand(*words, *problem())
    if words[0] == "thd":
        want, want_lse = torch.cat([want[0], want[1, :2]]), torch.cat([want_lse[0].mT, want_lse[1, :, :2].mT])
    else:
        out = out.permute(FORMATS[words[0]])
    torch.testing.assert_close((out, lse), (want, want_lse), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("words", GRID[::2] + GRID[1:4:2], ids=str)
def test_gradcheck(words: tuple[str, str, str, float]) -> None:
    *leaves, keep = problem()

    # Rows past the lengths have lse -inf, of which no difference can be taken.
    def results(*tensors: Tensor) -> list[Tensor]:
        return [torch.where(x.isinf(), 0, x) for x in on_grid(*words, *tensors, keep)]

    assert torch.autograd.gradcheck(results, [x.requires_grad_() for x in leaves])


def poisoned(pairwise: bool, name: str = "", value: float = 0.0) -> dict[str, Tensor]:
    """Results of rows 0-1 on keys 0-2 and of rows 2-3 on keys 3-4, parted by -inf.

    Row 2 of q, dout, dlse, row 3 of k, v, or place (2, 3) of bias gets a value.
    """
    g = torch.Generator().manual_seed(0)
    sizes = {"q": 4, "k": 5, "v": 5, "dout": 4, "dlse": 4}
    tensors = {x: torch.randn(1, n, 1, 2, generator=g, dtype=torch.float64) for x, n in sizes.items()}
    tensors["bias"] = torch.full((1, 1, 4, 5), -INF, dtype=torch.float64)
    tensors["bias"][..., :2, :3] = tensors["bias"][..., 2:, 3:] = 0.5
    if name:
        at = {"k": (0, 3, 0, 0), "v": (0, 3, 0, 0), "bias": (0, 0, 2, 3)}.get(name, (0, 2, 0, 0))
        tensors[name][at] = value
    leaves = [tensors[x].requires_grad_() for x in ("q", "k", "v", "bias")]
    out, lse = reference_attention(
        *leaves, qkv_format="bshd", bias_type="post_scale_bias", attn_scale=0.7, pairwise=pairwise
    )
    seeds = tensors["dout"].detach(), tensors["dlse"][..., 0].mT.detach()
    dq, dk, dv, dbias = torch.autograd.grad((out, lse), leaves, seeds)
    by_row = {"out": out[0], "lse": lse[0].mT, "dq": dq[0], "dk": dk[0], "dv": dv[0], "dbias": dbias[0, 0]}
    return {x: y.detach() for x, y in by_row.items()}


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("q", {"out", "lse", "dq", "dk", "dv", "dbias"}),
        ("k", {"out", "lse", "dq", "dk", "dv", "dbias"}),
        ("v", {"out", "dq", "dk", "dbias"}),
        ("bias", {"out", "lse", "dq", "dk", "dv", "dbias"}),
        ("dout", {"dq", "dk", "dv", "dbias"}),
        ("dlse", {"dq", "dk", "dbias"}),
    ],
)
def test_poison_stays_in_its_live_pairs(name: str, shown: set[str], value: float) -> None:
    # q, k and v that are not finite choose the pairwise form themselves.
    clean = poisoned(name in ("q", "k", "v", "dout"))
    got = poisoned(name == "dout", name, value)
    for x, y in got.items():
        mine = slice(3) if x in ("dk", "dv") else slice(2)
        assert torch.equal(y[mine], clean[x][mine]), x
    assert got["dbias"][:2, 3:].eq(0).all()
    assert got["dbias"][2:, :3].eq(0).all()
    if math.isnan(value):
        assert {x for x, y in got.items() if not y.isfinite().all()} == shown


@pytest.mark.parametrize("bias_type", ["pre_scale_bias", "post_scale_bias"])
def test_nan_scale_at_dead_pairs(bias_type: str) -> None:
    leaves = [x.requires_grad_() for x in problem()[:4]]
    out, lse = reference_attention(*leaves, qkv_format="bshd", bias_type=bias_type, mask_type="causal", attn_scale=NAN)
    assert out.isnan().all()
    assert lse.isnan().all()
    _, dk, dv, dbias = torch.autograd.grad(out.sum() + lse.sum(), leaves)
    assert dk[:, 3].eq(0).all()
    assert dv[:, 3].eq(0).all()
    assert torch.equal(dbias.isnan(), torch.ones_like(dbias).tril().bool())
    assert dbias.triu(1).nan_to_num(1).eq(0).all()


def test_plain_product_would_leak() -> None:
    """Why `pairwise` is asked for where the gradient of out is not finite."""
    assert poisoned(False, "dout", NAN)["dv"][:3].isnan().any()


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"bias_type": "alibi"}, "argument 'bias_type': expected one of no_bias, .*, got 'alibi'"),
        ({"mask_type": "none"}, "argument 'mask_type': .*got 'none'"),
        ({"qkv_format": "sb3hd"}, "argument 'qkv_format': .*got 'sb3hd'"),
        ({"bias_type": "pre_scale_bias"}, "argument 'bias': "),
        ({"bias": torch.zeros(1, 1, 1, 1)}, "argument 'bias': "),
        ({"dropout": 0.1}, "argument 'keep': "),
        ({"qkv_format": "thd"}, "argument 'cu_seqlens_q': "),
        ({"mask_type": "padding", "cu_seqlens_q": torch.tensor([0, 2])}, "expected 1 lengths up to 1, got \\[2\\]"),
        (
            {"mask_type": "padding", "cu_seqlens_q": torch.tensor([0, 1, 2])},
            "expected 1 lengths up to 1, got \\[1, 1\\]",
        ),
    ],
)
def test_refusals(kwargs: dict[str, object], message: str) -> None:
    kwargs = {"qkv_format": "bshd", "attn_scale": 1.0} | kwargs
    with pytest.raises(ValueError, match=message):
        reference_attention(*torch.zeros(3, 1, 1, 1, 1), **kwargs)  # type: ignore[arg-type]
