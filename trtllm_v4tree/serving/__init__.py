"""Serving: one engine thread, request semantics of every protocol, Triton models and the OpenAI endpoint.

Imports the runtime; nothing here is imported by it. Server libraries are imported where they are used, never at the top of `loop`.
"""
