"""Decides how deep each sequence drafts; needs numpy only (and safetensors to read a policy).

"Scheduler" in serving means who runs next. A `DepthScheduler` decides *how deep to draft*.

* `state.py`: `RoundState`, what a decision may see; `RoundOutcome`, what came of it.
* `depth.py`: `DepthScheduler`, the seam, and its checks.
* `cost.py`: `CostModel`, prices of model passes; `curve.py` and `cost_checks.py` serve it.
* `features.py`: `RoundState` as a bounded feature matrix.
* `baselines/`: rules without learning, and `make_scheduler`, which finds any scheduler by name.
* `policy_file.py`, `learned.py`: exported policies, and the scheduler that runs one.
* `files.py`: bounded reads and atomic writes.
"""
