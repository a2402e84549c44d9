// ggml's Vulkan backend names a few types of the extension VK_EXT_layer_settings, which Vulkan's C++ headers have since
// 1.3.272. It only uses them to switch on validation. With older headers these stand in, so that it compiles.
#pragma once
#ifdef __cplusplus
#include <vulkan/vulkan_core.h>
#if VK_HEADER_VERSION < 272
// What ggml defines before it includes the headers itself: the first inclusion decides.
#define VULKAN_HPP_DISPATCH_LOADER_DYNAMIC 1
namespace vk {
class DispatchLoaderDynamic;
}
vk::DispatchLoaderDynamic & ggml_vk_default_dispatcher();
#define VULKAN_HPP_DEFAULT_DISPATCHER ggml_vk_default_dispatcher()
#include <vector>
#include <vulkan/vulkan.hpp>

namespace vk {

enum class LayerSettingTypeEXT : uint32_t { eBool32 = 0 };

struct LayerSettingEXT {
    const char * layer;
    const char * name;
    LayerSettingTypeEXT type;
    uint32_t count;
    const void * values;
};

struct LayerSettingsCreateInfoEXT {
    VkStructureType sType = static_cast<VkStructureType>(1000496000);
    const void * pNext = nullptr;
    uint32_t count = 0;
    const LayerSettingEXT * settings = nullptr;

    explicit LayerSettingsCreateInfoEXT(const std::vector<LayerSettingEXT> & all)
        : count(static_cast<uint32_t>(all.size())), settings(all.data()) {}
};

}  // namespace vk
#endif
#endif
