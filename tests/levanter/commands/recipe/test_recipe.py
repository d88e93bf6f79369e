"""`recipe`: the published numbers of nanochat's miniseries, documents that train_lm reads, costs, refusals."""

import math
import re
from pathlib import Path

import pytest

from levanter.commands.cli.errors import run_entry_point
from levanter.commands.recipe.documents import base_document, replicated, rows_on_device, state_bytes
from levanter.commands.recipe.miniseries import Miniseries
from levanter.commands.recipe.recipe import RecipeConfig, main
from levanter.commands.train.config import TrainLmConfig
from levanter.config import load
from levanter.hardware import parse_accelerator
from levanter.models.nanochat.config import NanochatConfig

REPOSITORY = Path(__file__).parents[4]
# Depth: width, heads, matrices in blocks, total, 10⁹ FLOPs a token, steps and log2 of the batch at ratio 8; from
# nanochat 92d63d4, counted once with its own model.
PUBLISHED = {
    12: (768, 6, 84_935_088, 286_261_730, 0.760, 1_680, 19),
    20: (1280, 10, 393_217_200, 896_533_746, 2.886, 3_320, 20),
    24: (1536, 12, 679_478_976, 1_384_122_122, 4.775, 5_568, 20),
    26: (1664, 13, 863_897_580, 1_681_786_938, 5.991, 7_007, 20),
    32: (2048, 16, 1_610_615_808, 2_818_575_450, 10.771, 6_400, 21),
}


@pytest.mark.parametrize("depth", PUBLISHED)
def test_the_published_miniseries(depth):
    width, heads, matrices, total, flops, steps, batch = PUBLISHED[depth]
    series = Miniseries(depth=depth)
    assert (series.model.hidden_dim, series.model.num_heads) == (width, heads)
    assert (series.counts["transformer_matrices"], series.counts["total"]) == (matrices, total)
    assert round(series.flops_per_token / 1e9, 3) == flops
    assert (series.steps, series.step_tokens) == (steps, 2**batch)
    assert series.horizon == 8 * (matrices + 32768 * width)


def test_the_leaderboard_s_first_run():
    """Windows of half of the row, ratio 12: 4.3308e19 FLOPs for 8.7577e9 tokens."""
    series = Miniseries(depth=24, ratio=12)
    half = NanochatConfig.for_depth(24, max_seq_len=2048, window_divisor=2)
    spans = [2048 if w is None else w - 1 for w in map(half.window, range(24))]
    per_token = 6 * series.scaling_parameters + sum(12 * 1536 * span for span in spans)
    assert f"{series.horizon:.4e}" == "8.7577e+09" and series.steps * series.step_tokens == 8_757_706_752
    assert f"{per_token * 8_757_706_752:.4e}" == "4.3308e+19"


@pytest.mark.parametrize("depth", range(4, 41, 4))
@pytest.mark.parametrize("ratio", [8, 12, 20.0])
def test_formulas_at_every_depth(depth, ratio):
    """The spec's formulas, written out from the shapes of a block."""
    width = math.ceil(64 * depth / 128) * 128

    def parameters(layers):
        size = math.ceil(64 * layers / 128) * 128
        heads = size // 128
        # Four square matrices, two of the MLP, and a gate of 12 features for each head of every second layer.
        return layers * 12 * size**2 + (layers + 1) // 2 * 12 * heads + 32768 * size

    series = Miniseries(depth=depth, ratio=ratio)
    tokens = int(ratio * parameters(depth))
    batch = 2 ** round(math.log2(2**19 * (tokens / (ratio * parameters(12))) ** 0.383))
    assert (series.horizon, series.step_tokens, series.steps) == (tokens, batch, tokens // batch)
    scale = math.sqrt(batch / 2**19)
    rates = series.learning_rates
    assert rates["matrices"] == pytest.approx(0.02 * scale)
    assert rates["head"] == pytest.approx(0.008 * scale * math.sqrt(768 / width))
    assert rates["embedding"] == pytest.approx(0.3 * scale * math.sqrt(768 / width))
    assert rates["value tables"] == pytest.approx(rates["embedding"] / 2)
    assert (rates["r"], rates["s"]) == pytest.approx((0.005 * scale, 0.5 * scale))
    assert series.weight_decay == pytest.approx(0.28 * scale * parameters(12) / parameters(depth))


def run(*words):
    return run_entry_point(RecipeConfig, main, list(words))


def test_hours_and_dollars(capsys):
    """The hours of the spec's table: d20, d24, d32 at 45 % on v6e-8, and d24 at 35 %."""
    for depth, hours in ((20, {"45.0%": 0.84}), (24, {"45.0%": 2.34, "35.0%": 3.01}), (32, {"45.0%": 12.2})):
        assert run("--depth", str(depth), "--target", "v6e-8,v4-32", "--price", "v6e=2.70") == 0
        text = capsys.readouterr().out
        v6e, v4 = text.split("v6e-8: 8 chips of 918 TFLOP/s")[1].split("v4-32: 16 chips of 275 TFLOP/s")
        for mfu, expected in hours.items():
            line = re.search(rf"{mfu} +([\d.]+) h +([\d,.]+) chip-hours +\$([\d,]+)", v6e)
            assert float(line[1]) == pytest.approx(expected, rel=0.005)
            assert int(line[3].replace(",", "")) == pytest.approx(expected * 8 * 2.70, rel=0.01)
        # No price is built in.
        assert "price unknown" in v4


@pytest.mark.parametrize("depth", [4, 12, 20, 24, 32])
def test_documents_of_the_repository(depth):
    """They are what `recipe` writes, and a training configuration with these numbers."""
    series, name = Miniseries(depth=depth), f"nanochat_d{depth}"
    path = REPOSITORY / "config" / "recipes" / f"{name}.yaml"
    assert path.read_text() == base_document(series, parse_accelerator("v6e-8"), name=name)
    config = load(TrainLmConfig, ["--config_path", str(path)])
    assert config.model == series.model or config.model.hidden_dim == series.model.hidden_dim
    assert config.trainer.num_train_steps == series.steps
    assert config.trainer.train_batch_size * 2048 == series.step_tokens
    assert config.optimizer.learning_rate == pytest.approx(series.learning_rates["matrices"], rel=1e-5)
    assert config.data.components["web"].pack == "best_fit_cropped"
    assert not config.data.enforce_eos and not config.data.block_cross_document_attention


@pytest.mark.parametrize("depth", [4, 32])
def test_the_run_is_described(depth, capsys):
    """Every parameter is in one group of the optimizer, and the rows fit the mesh of each pod."""
    assert run("--depth", str(depth), "--target", "v6e-8,v4-32", "--plan", "true") == 0
    lines = capsys.readouterr().out.splitlines()[-2:]
    assert all("at least" in line for line in lines), lines


def test_layouts():
    v6e, small = parse_accelerator("v6e-8"), parse_accelerator("v5e-8")
    d24, d32 = Miniseries(depth=24), Miniseries(depth=32)
    # Parameters and gradients, one moment of Muon's matrices, two of everything else, 4 bytes each.
    assert state_bytes(d24) == 4 * (4 * 1_384_122_122 - 679_478_976)
    assert replicated(d24, v6e) and not replicated(d24, small) and not replicated(d32, v6e)
    assert rows_on_device(d24, v6e) == 8
    assert rows_on_device(Miniseries(depth=4), parse_accelerator("v6e-64")) == 2


def test_one_command_writes_what_it_prints(tmp_path, capsys):
    assert run("--depth", "12", "--ratio", "12", "--output_path", str(tmp_path)) == 0
    text = capsys.readouterr().out
    assert "2,520" in text and "1,321,210,944" in text and f"written: {tmp_path}/nanochat_d12.yaml" in text
    assert load(TrainLmConfig, ["--config_path", f"{tmp_path}/nanochat_d12.yaml"]).trainer.num_train_steps == 2520
    # An odd depth has the width of the next even one, and says so.
    assert run("--depth", "13") == 0
    assert "rounded up from 832 to whole heads" in capsys.readouterr().out
    assert run("--depth", "24", "--tokens", "10_000_000_000") == 0
    assert "given; 13.70 for each of" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--depth", "1"], "expected 2 to 128 layers"),
        (["--depth", "200"], "expected 2 to 128 layers"),
        (["--length", "1000"], "no multiple of 128 from 256 on, in which windows are rounded; nearest 1024"),
        (["--ratio", "8", "--tokens", "1_000_000"], "ratio and tokens: each gives the tokens of the run"),
        (["--tokens", "1000"], "less than a step of"),
        (["--batch", "100_000"], "nearest 100,352"),
        (["--batch", str(2048 * 12)], "nearest: 16,384 or 32,768 tokens"),
        (["--target", "v6-8"], "v6"),
        (["--price", "v6f=2"], "did you mean"),
        (["--deph", "20"], "depth"),
    ],
)
def test_bad_input(words, problem, capsys):
    assert run(*words) == 2
    assert problem in capsys.readouterr().err
