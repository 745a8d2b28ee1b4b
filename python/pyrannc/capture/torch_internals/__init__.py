"""Every private or undocumented name of torch that pyrannc uses, each with why, and what public name would replace it.

It stands with capture, which uses nearly all of them; what else uses some (blocks, profile, module) may import capture.
All other files keep to torch's public names, as ``tests/capture/test_torch_names.py`` proves; name by name, it also
holds what is relied upon. So a new version of torch shows here, and only here, what it has changed.

What belongs to export or ``torch.compile`` is imported when it is used: with it comes all of ``torch.compile``, which
takes more than a second.
"""
