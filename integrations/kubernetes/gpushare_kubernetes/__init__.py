"""The node agent that offers a machine's gpushare daemon to Kubernetes: `python -m gpushare_kubernetes`.

It connects and decides nothing: the scheduler of Kubernetes chooses a device and how much of it, the daemon and the runtime hold the
program to it. The agent says what the daemon's devices offer and hands the limits of a claim to the claim's containers.

    messages       the kubelet's gRPC messages, described by hand
    kubelet        gRPC servers on Unix sockets
    quantity       quantities of Kubernetes ("512Mi")
    api            resource.k8s.io/v1 over REST
    inventory      the daemon's devices
    shares         a part of a device: its limits, and the CDI file that gives them to a container
    dra            dynamic resource allocation: ResourceSlices, the plugin service v1
    device_plugin  the device plugin API v1beta1, for older clusters

docs/kubernetes.md says how to install and use it.
"""
# SPDX-License-Identifier: Apache-2.0
