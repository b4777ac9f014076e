"""A KV-cache pool that neither hangs, lies, leaks nor swallows a fault; only ``connector`` may know vLLM.

The rooms, from the ground up (each imports only from the floors below it):

1. ``clock``, ``fence``, ``errors``, ``observe``, ``keys``
2. ``config``, ``requests``, ``lookup/``, ``backend/``
3. ``layout``, ``coordinator``
4. ``transfer/``, ``scheduler``
5. ``layerwise/``
6. ``worker``
7. ``connector``
"""
