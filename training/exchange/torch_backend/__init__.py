"""The mesh as a backend of ``torch.distributed``, and the rendezvous store of launched scripts."""
