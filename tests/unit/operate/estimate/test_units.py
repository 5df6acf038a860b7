"""Units of a plan: three digits of tiny and huge numbers."""

import pytest

from glm46.operate.estimate import units


@pytest.mark.parametrize(("form", "value", "text"), [
    (units.amount, 0, "0.00"), (units.amount, 51.04, "51.04"), (units.amount, 0.0164, "0.0164"),
    (units.amount, 2.7e-5, "0.0000270"), (units.amount, 1e9, "1,000,000,000.00"),
    (units.binary_size, 0, "0 B"), (units.binary_size, 1023, "1,023 B"), (units.binary_size, 1536, "1.50 KiB"),
    (units.binary_size, 2**20, "1.00 MiB"), (units.binary_size, 2.35 * 2**30, "2.35 GiB"),
    (units.binary_size, 99_999 * 2**30, "99,999.0 GiB"),
    (units.decimal_size, 0, "0 B"), (units.decimal_size, 999, "999 B"), (units.decimal_size, 12_400, "12.4 kB"),
    (units.decimal_size, 116.3e6, "116.3 MB"), (units.decimal_size, 2.9e12, "2.9 TB"),
    (units.decimal_size, 2.9e16, "29.0 PB"),
    (units.duration, 0, "0.00 ms"), (units.duration, 3.1e-6, "3.10 µs"), (units.duration, 0.05817, "58.17 ms"),
    (units.duration, 1.233, "1.233 s"), (units.duration, 98765.4, "98,765.400 s"),
    (units.run_time, 0.628, "0.628 s"), (units.run_time, 59, "59.00 s"), (units.run_time, 60, "1.00 min"),
    (units.run_time, 3599, "59.98 min"), (units.run_time, 12_600, "3.50 h"), (units.run_time, 86_400, "1.00 days"),
    (units.run_time, 5_111_424, "59.16 days"), (units.run_time, 0, "0.00 s"),
    (units.flops_text, 0, "0.000 GFLOP"), (units.flops_text, 2e3, "2.000 kFLOP"),
    (units.flops_text, 2e6, "2.000 MFLOP"),    (units.flops_text, 218.234e9, "218.234 GFLOP"),
    (units.token_count, 999, "999"), (units.token_count, 4096, "4.096k"), (units.token_count, 4_194_304, "4.1943M"),
    (units.token_count, 15 * 10**12, "15T"), (units.token_count, 10**15, "1P"),
])  # fmt: skip
def test_a_number_keeps_three_digits(form, value, text):
    assert form(value) == text


def test_columns_are_as_wide_as_their_cells():
    assert units.aligned([("a", "change"), ("1,234", "x")]) == ["    a  change", "1,234       x"]


def test_parts_have_the_unit_of_their_total_unless_it_hides_them():
    total = 2.35 * 2**30
    parts = [0, 0.124 * 2**30, 5 * 2**20, 7]
    assert [units.binary_size(part, total) for part in parts] == ["0.00 GiB", "0.12 GiB", "5.00 MiB", "7 B"]
