"""Transfer layer by layer, beside the forward pass; must never know vLLM or who decided what to transfer.

* ``gate``: what a step waits on: signals that happen once, and the gate before attention
* ``batches``: addresses of one layer of many blocks, as arrays
* ``gva``: leases and open writes, each opened and given back in one place
* ``step``: one step's transfers and everything that belongs to them, closed as a whole
* ``threads``: the four transfer threads (global addresses or keys, sending or receiving)
* ``path``: what a worker calls
"""
