"""accelerate's own test_sync: no_sync and gradient accumulation."""

from accelerate.test_utils.scripts import test_sync

test_sync.main()
print("RESULT", '"it passed"') if test_sync.Accelerator().is_main_process else None
