"""Lesson 11's questions."""

from __future__ import annotations

from nbddp.lessons.framework.question import Question

QUESTIONS = (
    Question(
        "added_to_the_script",
        "Which call does a script need that the cells do not have?",
        options=("torch.cuda.set_device", "init_process_group", "destroy_process_group", "none"),
        came="destroy_process_group",
        because="The group stays between cells, but a script has to leave it at its end.",
        seen=r"torch\.distributed\.destroy_process_group\(\)",
    ),
    Question(
        "quoted_characters",
        "Which characters of the path need quotes in the shell?",
        options=("the space", "the apostrophe", "both", "neither"),
        came="both",
        because="The shell splits words at spaces, and an apostrophe begins a quotation.",
        seen="""'Ada'"'"'s runs/train.py'""",
    ),
    Question(
        "printing_node",
        "Which nodes print something?",
        options=("node 0", "node 1", "both"),
        came="node 0",
        because="The program prints on rank 0 only, and static rendezvous puts rank 0 on node 0.",
        seen=r"node 0:\nstep 0: [\s\S]*node 1:\n$",
    ),
    Question(
        "losses_under_torchrun",
        "How do the losses compare with those in the notebook?",
        options=("they are the same", "they are close", "they differ, as random data does"),
        came="they are the same",
        because="The program, the seeds and the number of ranks are the same.",
    ),
    Question(
        "option_that_follows_the_backend",
        "Which option of the torchrun lines depends on the backend, NCCL or Gloo?",
        options=("--rdzv-backend", "--nproc-per-node", "none"),
        came="none",
        because="The program chooses the backend. --rdzv-backend says how nodes find each other.",
        explored=True,
    ),
    Question(
        "node_rank_in_double_quotes",
        "Which --node-rank does node 1 get from the line in double quotes?",
        came="0",
        because="The batch script's own shell replaced the variable, on the first node.",
        seen=r"double quotes:\ntorchrun --node-rank 0\ntorchrun --node-rank 0\n",
    ),
    Question(
        "node_rank_in_single_quotes",
        "And from the line in single quotes?",
        came="1",
        because="The shell on node 1 replaced it.",
        seen=r"single quotes:\ntorchrun --node-rank 0\ntorchrun --node-rank 1\n",
    ),
)
