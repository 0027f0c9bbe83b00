from kvant.scheduler.policy import WaitingQueue, victim
from kvant.types import Sequence
from tests.scheduler.harness import request


def sequences(count: int) -> list[Sequence]:
    return [Sequence(request=request(f"r{i}", [1]), index=0, tokens=[1]) for i in range(count)]


def test_first_come_first_served_and_preempted_ones_before():
    queue = WaitingQueue()
    a, b, c, d = sequences(4)
    queue.push(a)
    queue.push(b)
    queue.push_front(d)  # preempted first: admitted later than c
    queue.push_front(c)
    assert list(queue) == [c, d, a, b]
    assert queue.peek() is c and queue.pop() is c
    queue.remove(a)
    assert list(queue) == [d, b] and len(queue) == 2


def test_the_victim_is_the_last_admitted_that_is_not_scheduled_and_has_nothing_pending():
    running = sequences(4)
    assert victim(running, 0) is running[3]
    running[3].num_pending = 1
    assert victim(running, 0) is running[2]
    assert victim(running, 3) is None
    assert victim(running, 4) is None
