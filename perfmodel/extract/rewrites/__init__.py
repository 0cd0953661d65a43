"""Where a device runs other operators than torch picks for tensors without storage. One named function a difference.

torch chooses many operators above the dispatch mode, by device: attention kernels, dropout, batch norm, RNNs, autocast
casts. A *route* makes that choice for the target instead; it runs the operators the target would run, so autograd saves
and frees what it would there. A *pass* changes the finished list of ops where no operator call can stand for the
difference. `Graph.rewrites` names those that took effect.

Routes (modules attention, norm, dropout, rnn, softmax, autocast): `sdpa`, `batch_norm`, `rms_norm`, `dropout`, `rnn`,
`softmax`, `autocast`. Steps that the driver adds: `grad_scaler` (scaler). Passes: `fused_embedding_update` (embedding);
TF32 marks (tf32) change no op and are not named. Always on CUDA: foreach optimizers (`extract/optimizers.py`) and one
host-to-device copy an input (`extract/step.py`).
"""
