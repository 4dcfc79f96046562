use comfy_table::presets::UTF8_FULL_CONDENSED;
use indicatif::BinaryBytes;
use kvpool::storage::host_free_bytes;
use serde_json::{Value, json};

use crate::EXIT_OK;
use crate::args::InfoArgs;
use crate::error::output_failed;
use crate::{fit, output};

pub fn info(args: &InfoArgs) -> anyhow::Result<u8> {
    let mut devices = vec![host()];
    // Why there are no devices but the host, if so.
    let cuda = match cuda() {
        Ok(found) if found.is_empty() => Some("the driver has no device".to_owned()),
        Ok(found) => {
            devices.extend(found);
            None
        }
        Err(reason) => Some(reason),
    };
    let info = json!({ "devices": devices, "cuda": cuda });
    let text = if args.json { format!("{info:#}") } else { render(&info, fit::width()) };
    output::print(&text).map_err(output_failed)?;
    Ok(EXIT_OK)
}

/// Describes a device. `unusable` is why it cannot be used, if so.
fn device(
    device: &str,
    name: String,
    free_bytes: Option<u64>,
    total_bytes: Option<u64>,
    unusable: Option<String>,
) -> Value {
    json!({
        "device": device,
        "name": name,
        "free_bytes": free_bytes,
        "total_bytes": total_bytes,
        "unusable": unusable,
    })
}

fn host() -> Value {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let name = format!("{} {}, {cores} cores", std::env::consts::ARCH, std::env::consts::OS);
    device("host", name, host_free_bytes(), None, None)
}

#[cfg(not(feature = "cuda"))]
fn cuda() -> Result<Vec<Value>, String> {
    Err(crate::output::not_built("cuda"))
}

#[cfg(feature = "cuda")]
fn cuda() -> Result<Vec<Value>, String> {
    use kvpool_cuda::{Device, DeviceInfo, devices};

    let describe = |info: DeviceInfo| {
        // Errors of its context, and its free memory, are known only after opening it.
        let free = match &info.unusable {
            Some(error) => Err(error.to_string()),
            None => Device::open(usize::from(info.ordinal))
                .map_err(|error| error.to_string())
                .and_then(|device| device.memory_bytes().map_err(|error| error.to_string())),
        };
        let name = format!(
            "{}, compute capability {}, {} multiprocessors",
            info.name, info.capability, info.multiprocessors
        );
        let free_bytes = free.as_ref().ok().map(|&(free, _)| free);
        device(&format!("cuda:{}", info.ordinal), name, free_bytes, Some(info.memory_bytes), free.err())
    };
    devices().map(|found| found.into_iter().map(describe).collect()).map_err(|error| error.to_string())
}

/// Renders the table, whose columns are the fields of the JSON, without units.
fn render(info: &Value, width: Option<usize>) -> String {
    let mut table = output::table(UTF8_FULL_CONDENSED);
    for (row, device) in info["devices"].as_array().into_iter().flatten().enumerate() {
        let fields = device.as_object().expect("an object");
        if row == 0 {
            table.set_header(fields.keys().map(|name| name.trim_end_matches("_bytes")));
        }
        table.add_row(fields.iter().map(|(name, value)| match (name.as_str(), value) {
            ("unusable", Value::String(reason)) => format!("yes: {reason}"),
            ("unusable", _) => "no".to_owned(),
            (_, Value::String(text)) => text.clone(),
            (_, value) => value.as_u64().map_or(String::new(), |bytes| BinaryBytes(bytes).to_string()),
        }));
    }
    let table = fit::table(table, width);
    match info["cuda"].as_str() {
        None => table,
        Some(reason) => fit::text(&format!("{table}\nno CUDA devices: {reason}"), width),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_tells_why_a_device_cannot_be_used() {
        let old = device("cuda:3", "old".into(), None, Some(1 << 30), Some("too old".into()));
        let text = render(&json!({ "devices": [host(), old], "cuda": null }), None);
        for part in ["cuda:3", "1.00 GiB", "yes: too old", "no ", "total"] {
            assert!(text.contains(part), "no {part} in {text}");
        }
        let text = render(&json!({ "devices": [host()], "cuda": "no driver" }), None);
        assert!(text.ends_with("no CUDA devices: no driver"), "{text}");
    }
}
