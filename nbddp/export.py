"""From the notebook to a cluster, as text: the torchrun line of each node, a Slurm batch script, a script out of cells.

A `Launch` describes the start of a script, and a `Job` the request to Slurm. `torchrun_line`, `sbatch_script` and
`script` turn them into text. Every value is quoted for the shell that reads it. `C10D`, `STATIC` and `SRUN` are the
values of `Launch.rendezvous`.

Example:

    from nbddp.export import Job, Launch, sbatch_script
    text = sbatch_script(Launch("train.py", nnodes=2, nproc=4), Job(time="02:00:00"))
"""

from nbddp.capabilities.export.cells import script
from nbddp.capabilities.export.sbatch import Job, sbatch_script
from nbddp.capabilities.export.torchrun_line import C10D, SRUN, STATIC, Launch, torchrun_line

__all__ = ["C10D", "SRUN", "STATIC", "Job", "Launch", "sbatch_script", "script", "torchrun_line"]
