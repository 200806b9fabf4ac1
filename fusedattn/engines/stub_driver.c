/* A stub of the CUDA driver: what cuDNN looks up in libcuda.so.1 while it builds a plan, and nothing that runs one.

   cuDNN compiles kernels by itself and gives the driver only the finished code to keep, so two functions must succeed.
   All others may answer that there is no device. No C library is needed, so that one object loads beside any.

   stub_driver.py holds this file, compiled with gcc or aarch64-linux-gnu-gcc and

       -shared -fPIC -Os -ffreestanding -nostdlib -fno-stack-protector -fno-unwind-tables
       -fno-asynchronous-unwind-tables -s -Wl,-soname,libcuda.so.1,--hash-style=gnu,--build-id=none,-z,noseparate-code
       -Wl,-z,noexecstack,-z,norelro

   as base64.b64encode(zlib.compress(object, 9)). The name that counts is the soname. */

#define NO_DEVICE 100 /* CUDA_ERROR_NO_DEVICE */

/* Tells this library from a driver. */
int fusedattn_stub_driver(void) { return 1; }

/* A handle that is not null and is never read. */
static int give_handle(void **handle) {
    *handle = (void *)0x1000;
    return 0;
}

static int no_device(void) { return NO_DEVICE; }

#define SUCCEEDS(name) int name(void **) __attribute__((alias("give_handle")));
#define FAILS(name) int name(void) __attribute__((alias("no_device")));

SUCCEEDS(cuLibraryGetKernel)
SUCCEEDS(cuLibraryLoadData)

/* Bound when libcudnn_engines_runtime_compiled is loaded. */
FAILS(cuGetErrorString)
FAILS(cuModuleGetFunction)
FAILS(cuModuleLoadData)
FAILS(cuModuleUnload)
FAILS(cuTensorMapEncodeIm2col)
FAILS(cuTensorMapEncodeTiled)

/* Looked up by name; a plan cannot be built where one is missing. */
FAILS(cuCtxGetCurrent)
FAILS(cuCtxGetLimit)
FAILS(cuCtxPopCurrent)
FAILS(cuCtxPushCurrent)
FAILS(cuDeviceGet)
FAILS(cuDeviceGetCount)
FAILS(cuDriverGetVersion)
FAILS(cuGetErrorName)
FAILS(cuKernelGetAttribute)
FAILS(cuKernelSetAttribute)
FAILS(cuLaunchCooperativeKernel)
FAILS(cuLaunchKernel)
FAILS(cuLibraryLoadFromFile)
FAILS(cuLibraryUnload)
FAILS(cuLinkAddData)
FAILS(cuLinkComplete)
FAILS(cuLinkCreate)
FAILS(cuLinkDestroy)
FAILS(cuStreamGetCtx)

/* Looked up by name; cuDNN complains on stderr where one is missing. */
FAILS(cuInit)
FAILS(cuKernelGetFunction)
FAILS(cuLaunchKernelEx)
FAILS(cuOccupancyMaxPotentialClusterSize)
