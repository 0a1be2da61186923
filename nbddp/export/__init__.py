"""From the notebook to a cluster, as text: the torchrun line of each node, a Slurm batch script, a script out of cells.

Small pure functions from plain arguments to text, every value quoted for the shell that will read it:

    from nbddp.export import Job, Launch, sbatch_script, script, torchrun_line
"""

from nbddp.export.cells import script
from nbddp.export.launch import C10D, SRUN, STATIC, Launch, torchrun_line
from nbddp.export.slurm import Job, sbatch_script

__all__ = ["C10D", "SRUN", "STATIC", "Job", "Launch", "sbatch_script", "script", "torchrun_line"]
