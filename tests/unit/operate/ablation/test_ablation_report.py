"""Figures and the table of an ablation, from made-up rows whose figures are known."""

import pytest

from glm46.operate.ablation.report import run_figures, table

STEPS = 20


def rows(loss: float, speed: float = 100.0) -> list[dict]:
    """Rows of a run whose loss falls to ``loss`` and stays there for the last tenth."""
    return [
        {
            "step": step,
            "tokens": 10 * step,
            "loss": loss + 9.0,
            "loss_mean": loss + max(0, STEPS - 2 - step),
            "tokens_per_second": 1.0 if step == 1 else speed,
        }
        for step in range(1, STEPS + 1)
    ]


def test_figures_of_a_run():
    assert run_figures(rows(4.0), [{"validation_loss": 9.0}, {"validation_loss": 8.0}]) == {
        "final_loss": 4.0,
        "validation_loss": 8.0,
        "tokens_per_second": 100.0,
    }


def test_figures_that_the_rows_do_not_have_are_absent():
    """A loss that was not finite is None in its row; a run without validation has no validation loss."""
    train = rows(4.0)
    train[-1]["loss_mean"] = None
    assert run_figures(train, []) == {"tokens_per_second": 100.0}
    assert run_figures([], []) == {}


def test_gaps_are_between_runs_of_one_seed():
    by_variant = {
        "a": {0: {"final_loss": 4.0, "tokens_per_second": 100.0}, 1: {"final_loss": 4.4}},
        "b": {0: {"final_loss": 5.0, "tokens_per_second": 150.0}, 1: {"final_loss": 4.84}},
        "c": {},
    }
    header, _, a, b, c = table(by_variant, 2)
    assert header == "| variant | final loss | gap, % | validation loss | gap, % | tokens/s | gap, % | runs |"
    assert a == "| a | 4.2000 ± 0.2828 |  |  |  | 100 |  | 2 of 2 |"
    # 25 % and 10 %
    assert b == "| b | 4.9200 ± 0.1131 | +17.500 ± 10.607 |  |  | 150 | +50.0 | 2 of 2 |"
    assert c == "| c |  |  |  |  |  |  | 0 of 2 |"


@pytest.mark.parametrize("baseline", [{}, {0: {}}, {1: {"final_loss": 4.0}}])
def test_without_a_baseline_of_the_seed_there_is_no_gap(baseline):
    assert table({"a": baseline, "b": {0: {"final_loss": 5.0}}}, 1)[-1] == "| b | 5.0000 |  |  |  |  |  | 1 of 1 |"
