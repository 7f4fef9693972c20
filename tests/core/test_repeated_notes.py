from equipoise.core import RepeatedNotes


def test_notes_that_differ_in_numbers_are_shown_once_and_counted_in_the_end():
    shown: list[str] = []
    with RepeatedNotes(shown.append) as notes:
        notes.note("3 of 4 samples stalled (worst 1.2e-03 after 7 steps): loosen tolerance.")
        notes.note("step 3 was skipped: the loss was nan.")
        for count in range(2, 12):
            notes.note(
                f"{count} of 4 samples stalled (worst {count}e+10 after 50 steps): loosen "
                f"tolerance. This was failure {count} in {2 * count} solves."
            )
        notes.note("step 9 was skipped: the loss was inf.")
        notes.note("step 9 was skipped: the gradient was not finite.")
        assert len(shown) == 3
    assert shown[3:] == [
        "11 of 4 samples stalled (worst 11e+10 after 50 steps): loosen tolerance. This was failure "
        "11 in 22 solves. (10 more warnings like the first)",
        "step 9 was skipped: the loss was inf. (1 more warning like the first)",
    ]
    notes.close()
    assert len(shown) == 5
