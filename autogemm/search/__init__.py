"""Search: which Config is best for a Problem.

``tune.py`` is the way in. It ranks the space by the model (``candidates.py``), has kernels compiled and checked ahead of need
(``supply.py``, ``gate.py``), and runs the loop (``loop.py``) that claims trials from a store (``trial.py``; Optuna's in
``study.py`` and ``storage.py``), has them tried by an evaluator (``evaluate.py``: ``model`` predicts, ``device`` measures) and
decides. Measured finalists race (``race.py``, ``stats.py``). ``worker.py`` serves studies that many GPUs share.
"""
