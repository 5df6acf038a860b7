"""The table of faults for scripts/check_mutations.py fits the code; the script itself takes an hour."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_SPEC = importlib.util.spec_from_file_location("check_mutations", ROOT / "scripts" / "check_mutations.py")
check_mutations = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(check_mutations)
MUTATIONS = check_mutations.read_mutations()


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name.replace(" ", "-"))
def test_each_fault_can_be_planted_and_its_tests_exist(mutation):
    text = (ROOT / mutation.file).read_text()
    changed = check_mutations.planted(mutation, text)
    assert changed != text
    compile(changed, mutation.file, "exec")
    for test in mutation.tests:
        file, *names = test.split("::")
        source = (ROOT / file).read_text()
        assert all(re.search(rf"^def {re.escape(name.partition('[')[0])}\(", source, re.MULTILINE) for name in names)


def test_at_least_sixty_faults_with_names_of_their_own():
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 60


def test_an_ambiguous_fault_is_refused():
    mutation = check_mutations.Mutation("twice", "a.py", "x", "y", [])
    with pytest.raises(ValueError, match="occurs 2 times"):
        check_mutations.planted(mutation, "x = x\n")
