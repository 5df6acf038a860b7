"""Prices of the table: what a plan takes of it, and what it lacks."""

import pytest

from glm46.cli import main
from glm46.engine.observe.peaks import ACCELERATORS, accelerator_of
from glm46.operate.estimate.prices import PRICES, price_of


def test_every_price_is_of_a_known_gpu_and_falls_with_what_one_gives_up():
    assert {gpu.name for gpu in ACCELERATORS} >= PRICES.keys()
    for price in PRICES.values():
        assert price.on_demand > 0
        assert all(0 < less < price.on_demand for less in price[1:] if less)
    h100 = PRICES["H100"]
    assert h100.on_demand > h100.reserved > h100.spot > 0


@pytest.mark.slow
def test_a_plan_takes_prices_of_the_table(capsys):
    command = ["plan", "--config", "train_configs/air_lora.toml", "--gpu", "H100", "--price"]
    costs = {}
    for price in ("on-demand", str(PRICES["H100"].on_demand), "spot"):
        assert main([*command, price]) == 0
        costs[price] = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("  cost"))
    first, second, spot = costs.values()
    assert first == second != spot and f"(at ${PRICES['H100'].spot:.2f})" in spot


@pytest.mark.parametrize(
    ("gpu", "kind", "known"), [("B200", "spot", "has on-demand of B200"), ("L4", "spot", "none of L4")]
)
def test_a_price_that_is_not_known_is_refused(gpu, kind, known, capsys):
    with pytest.raises(ValueError, match=known):
        price_of(accelerator_of(gpu), kind)
    assert main(["plan", "--config", "train_configs/debug.toml", "--gpu", gpu, "--price", kind]) == 2
    assert f"--price {kind}: the table of prices" in capsys.readouterr().err
