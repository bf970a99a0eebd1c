"""Text in, text out, streamed; the engine belongs to the model tensorrt_llm."""

import triton_python_backend_utils as pb_utils

from trtllm_v4tree.serving.triton_models import TextModel


class TritonPythonModel(TextModel):
    def __init__(self) -> None:
        super().__init__(pb_utils)
