"""Runs tests as on macOS: `python -m pytest -p tests.versions.elsewhere`.

A test in which nbddp uses what macOS does not have fails, also where the error was caught; those of `LOST` are skipped.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.versions import refused

FREES = "no rank is freed: what is blocked is replaced"
ENDS = "a group whose work does not end is left to itself"
PROC = "no sockets and threads are told"
PEAK = "the peak is the worker's, not the last cell's"
STACK = "a silent rank shows no stack"
NCCL = "there is no NCCL"
SAYS = "the first cell says what is lost"
SLOW = "thirty workers that are replaced take minutes"
LOST = {  # file::name of tests of what macOS does not give, and why
    "test_cells.py::test_stop_frees_a_stuck_collective_and_keeps_state": FREES,
    "test_cells.py::test_deadlock_is_shown_as_a_table_and_stacks_tell_more": FREES,
    "test_doctor.py::test_a_seam_that_is_taken_away_is_told_with_its_loss[abort of transfers]": FREES,
    "test_faults.py::test_release_touches_only_torchs_sockets": FREES,
    "test_libraries.py::test_accelerate_begins_anew_when_its_group_is_gone[fails]": FREES,
    "test_libraries.py::test_deepspeed_keeps_no_group_that_is_gone[fails]": FREES,
    "test_groups.py::test_peer_of_a_rank_that_dies_in_the_midst_of_a_message_is_freed": FREES,
    "test_groups.py::test_process_that_dies_after_its_rank_had_left_the_cell_is_told[while]": ENDS,
    "test_groups.py::test_program_that_receives_from_any_source_again_and_again_is_freed": FREES,
    "test_groups.py::test_rank_that_cannot_end_its_group_is_replaced_and_that_is_said": ENDS,
    "test_groups.py::test_rank_that_never_stops_to_move_bytes_is_replaced_by_a_second_stop": FREES,
    "test_groups.py::test_receive_from_any_source_is_freed": FREES,
    "test_groups.py::test_report_says_that_the_group_has_been_ended_if_all_ranks_aborted_it": FREES,
    "test_groups.py::test_stop_lets_a_message_on_its_way_through_and_names_are_kept": PROC,
    "test_groups.py::test_thirty_deadlocks_leave_no_descriptors_and_threads_behind": SLOW,
    "test_groups.py::test_thread_that_a_finished_rank_left_in_a_collective_is_freed": FREES,
    "test_leaving.py::test_all_ranks_that_waited_for_the_one_that_left_are_named": FREES,
    "test_memory.py::test_memory_in_a_notebook": PEAK,
    "test_memory.py::test_peak_is_the_last_cells": PEAK,
    "test_faults.py::test_stacks_in_a_terminal_while_the_cell_runs_and_after_it": STACK,
    "test_orphans.py::test_kernel_killed_and_restarted_while_a_cell_runs": SAYS,
    "test_release.py::test_a_connection_that_is_being_made_is_shut_too": PROC,
    "test_release.py::test_a_socket_that_somebody_looks_at_is_shut_all_the_same": PROC,
    "test_release.py::test_nor_does_a_copy_under_a_lower_number_hide_it": PROC,
    "test_release.py::test_broken_group_of_nccl_is_aborted_and_any_other_destroyed": NCCL,
    "test_release.py::test_call_in_progress_counts_what_has_appeared_so_far": PROC,
    "test_release.py::test_main_thread_of_a_fork_is_its_own": PROC,
    "test_release.py::test_only_sockets_that_appeared_while_watched_are_shut": PROC,
    "test_release.py::test_sockets_are_shut_from_a_while_after_until_the_block_has_ended": PROC,
    "test_stop.py::test_stop_that_goes_to_all_processes_under_the_kernel_is_stop[blocked]": FREES,
    "test_exercises.py::test_the_lessons_solution_passes_and_its_exercise_does_not[train_uneven]": FREES,
    "test_torchrun_contract.py::test_a_users_thread_count_wins": SAYS,
    "test_torchrun_contract.py::test_a_variable_that_torch_reads_at_import_is_there_before_it": SAYS,
    "test_versions.py::test_making_groups_prints_nothing": SAYS,
}
_folder: list[tempfile.TemporaryDirectory[str]] = []


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Before anything imports nbddp."""
    _folder.append(tempfile.TemporaryDirectory())
    os.environ.update(refused.environment(Path(_folder[0].name), os.environ))
    refused.install()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        name = item.nodeid[item.nodeid.index(item.path.name) :]
        why = LOST.get(name) or LOST.get(name.partition("[")[0]) or LOST.get(name.partition("::")[0])
        if why:
            item.add_marker(pytest.mark.skip(reason=f"macOS: {why}"))


@pytest.fixture(autouse=True)
def _uses_of_what_macos_lacks() -> Iterator[None]:
    before = len(refused.uses(Path(_folder[0].name)))
    yield
    new = refused.uses(Path(_folder[0].name))[before:]
    assert not new, new
