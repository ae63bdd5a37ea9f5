"""The list of mistakes that `make mutants` tries does not rot."""

from mutants import mutants


def test_every_mistake_can_be_made_and_names_tests_that_exist() -> None:
    entries = mutants()
    assert len(entries) >= 60
    assert [fault for m in entries if (fault := m.fault())] == []
    assert len({(m.file, m.old, m.new) for m in entries}) == len(entries)
    assert all(m.tests and m.old != m.new for m in entries)
