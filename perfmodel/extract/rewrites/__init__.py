"""Where a device runs other operators than torch picks for tensors without storage. One named function a difference.

torch chooses many operators above the dispatch mode, by device: attention kernels, dropout, batch norm, RNNs, autocast
casts. A *route* makes that choice for the target instead; it runs the operators the target would run, so autograd saves
and frees what it would there. A *pass* changes the finished list of ops where no operator call can stand for the
difference. `Graph.rewrites` names those that took effect.

Routes (functions in attention, norm, dropout, rnn, autocast): `sdpa`, `batch_norm`, `rms_norm`, `dropout`, `lstm`,
`gru`, `rnn`, `autocast`. Steps added by the driver: `grad_scaler` (scaler), `foreach_optimizer` (optimizers),
`host_to_device_copies` (step). Passes: `tf32` (tf32), `fused_embedding_update` (embedding).
"""
