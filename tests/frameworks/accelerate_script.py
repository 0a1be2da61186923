"""accelerate's own test_script: launch, samplers, and a training against one without it."""

from accelerate.test_utils.scripts import test_script

test_script.main()
print("RESULT", '"it passed"') if test_script.Accelerator().is_main_process else None
