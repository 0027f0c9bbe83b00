import pytest

from kvant.scheduler.budget import Seats


def test_the_lowest_free_seat_is_taken_first():
    seats = Seats(3)
    assert [seats.take() for _ in range(3)] == [0, 1, 2]
    seats.give_back(2)
    seats.give_back(0)
    assert seats.take() == 0
    assert seats.take_freed() == (2, 0) and seats.take_freed() == ()


def test_reserved_seats_are_not_free():
    seats = Seats(3)
    seats.num_reserved = 2
    assert seats.num_free == 1


def test_check_notices_a_seat_that_is_taken_twice_or_lost():
    seats = Seats(3)
    first = seats.take()
    seats.check([first])
    for wrong in ([], [first, first], [first, 1], [first, None]):
        with pytest.raises(AssertionError):
            seats.check(wrong)
