"""From the notebook to a cluster, as text: the torchrun line of each node, a Slurm batch script, a script out of cells.

Small pure functions from plain arguments to text, every value quoted for the shell that will read it:

    from nbddp.export import Job, Launch, sbatch_script, script, torchrun_line
"""

from nbddp.capabilities.export.cells import script
from nbddp.capabilities.export.sbatch import Job, sbatch_script
from nbddp.capabilities.export.torchrun_line import C10D, SRUN, STATIC, Launch, torchrun_line

__all__ = ["C10D", "SRUN", "STATIC", "Job", "Launch", "sbatch_script", "script", "torchrun_line"]
