"""A core for each thread that computes: while it does, where every core has one, and unless others are busy there."""

from __future__ import annotations

import threading

import pytest

from everybert.serving import cores


class Machine:
    """Two cores, and a clock that only moves when told to."""

    def __init__(self) -> None:
        self.cores, self.now, self.ran = {3, 5}, 100.0, 0.0
        self.moves: list[tuple[str, set[int]]] = []

    def place(self, pid: int, where: set[int]) -> None:
        assert pid == 0, "the calling thread alone"
        self.moves.append((threading.current_thread().name, where))

    def compute(self, seconds: float, of_them: float) -> None:
        with cores.on_own_core():
            self.now += seconds
            self.ran += of_them


@pytest.fixture
def machine(monkeypatch):
    machine = Machine()
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda pid: set(machine.cores), raising=False)
    monkeypatch.setattr(cores.os, "sched_setaffinity", machine.place, raising=False)
    monkeypatch.setattr(cores.time, "monotonic", lambda: machine.now)
    monkeypatch.setattr(cores.time, "thread_time", lambda: machine.ran)
    monkeypatch.setattr(cores, "_of_thread", threading.local())
    return machine


def in_threads(*works):
    threads = [threading.Thread(target=work, name=str(i)) for i, work in enumerate(works)]
    for thread in threads:
        thread.start()
        thread.join()


def test_each_thread_stays_on_its_own_core_while_it_computes(machine):
    def work(number):
        cores.take(number, 2)
        machine.compute(0.01, 0.01)

    in_threads(lambda: work(0), lambda: work(1))
    machine.compute(0.01, 0.01)  # this thread has none
    assert machine.moves == [("0", {3}), ("0", {3, 5}), ("1", {5}), ("1", {3, 5})]


@pytest.mark.parametrize("threads", [1, 3])
def test_no_core_is_taken_where_threads_and_cores_differ(machine, threads):
    cores.take(0, threads)
    machine.compute(0.01, 0.01)
    assert not machine.moves


def test_no_core_is_taken_where_the_system_has_no_such_call(machine, monkeypatch):
    monkeypatch.delattr(cores.os, "sched_getaffinity")
    cores.take(0, 2)
    machine.compute(0.01, 0.01)
    assert not machine.moves


def test_a_core_that_others_use_is_left_for_a_while(machine):
    cores.take(0, 2)
    machine.compute(0.01, 0.001)
    machine.compute(0.01, 0.009)  # the first was an accident
    machine.compute(0.01, 0.001)
    assert len(machine.moves) == 6
    machine.compute(0.01, 0.001)  # twice in a row
    assert len(machine.moves) == 8
    machine.compute(0.01, 0.01)
    assert len(machine.moves) == 8, "the kernel chooses"
    machine.now += cores.PAUSE
    machine.compute(0.01, 0.01)
    assert len(machine.moves) == 10


def test_errors_pass_and_the_thread_is_free_again(machine):
    cores.take(1, 2)
    with pytest.raises(ValueError, match="of the model"), cores.on_own_core():
        raise ValueError("of the model")
    assert machine.moves[-1][1] == {3, 5}


def test_what_an_operator_changes_later_stays(machine):
    cores.take(1, 2)
    machine.cores = {3}  # taskset, while the server runs
    machine.compute(0.01, 0.01)
    assert [where for _, where in machine.moves] == [{3}]
    machine.cores = {3, 5, 7}
    machine.compute(0.01, 0.01)
    assert [where for _, where in machine.moves[1:]] == [{5}, {3, 5, 7}]


def test_cores_that_are_taken_away_do_not_matter(machine, monkeypatch):
    def refuse(pid, where):
        raise OSError("no such core")

    cores.take(1, 2)
    monkeypatch.setattr(cores.os, "sched_setaffinity", refuse)
    done = []
    with cores.on_own_core():
        done.append(1)
    assert done
