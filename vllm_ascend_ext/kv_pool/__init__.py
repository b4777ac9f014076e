"""A KV-cache pool that neither hangs, lies, leaks nor swallows a fault; only ``connector`` may know vLLM.

The rooms, from the ground up (each imports only from the floors below it):

1. ``clock``, ``fence``, ``errors``, ``observe``, ``keys``
2. ``config``, ``groups``, ``requests``, ``layout``, ``calls``, ``lookup/``, ``backend/``
3. ``jobs``, ``coordinator``, ``orders`` (which blocks, which keys), ``outcomes`` (what failed), ``reuse``
4. ``transfer/`` (whole blocks), ``scheduler``
5. ``layerwise/`` (layer by layer)
6. ``worker``
7. ``connector``
"""
