//! `kvpool info`.

use comfy_table::presets::UTF8_FULL_CONDENSED;
use indicatif::BinaryBytes;
use kvpool::storage::host_free_bytes;
use serde::Serialize;

use super::CommandError;
use crate::EXIT_OK;
use crate::args::InfoArgs;
use crate::output;

/// The columns of the table: the fields of a [`Place`], without units.
const COLUMNS: [&str; 5] = ["device", "name", "free", "total", "unusable"];

/// Where a pool could have its memory.
#[derive(Serialize)]
struct Info {
    devices: Vec<Place>,
    /// Why there are no devices but the host, where there are none.
    cuda: Option<String>,
}

/// One such place.
#[derive(Serialize)]
struct Place {
    device: String,
    name: String,
    free_bytes: Option<u64>,
    total_bytes: Option<u64>,
    /// Why it cannot be used; nothing if it can.
    unusable: Option<String>,
}

/// Prints where a pool can have its memory, and returns the exit code.
pub fn info(args: &InfoArgs) -> Result<u8, CommandError> {
    let mut devices = vec![host()];
    let cuda = match cuda() {
        Ok(found) => {
            let none = found.is_empty().then(|| "the driver has no device".to_owned());
            devices.extend(found);
            none
        }
        Err(reason) => Some(reason),
    };
    let info = Info { devices, cuda };
    let text = if args.json {
        serde_json::to_string_pretty(&info).map_err(|error| CommandError::Output(error.into()))?
    } else {
        render(&info)
    };
    output::print(&text).map_err(CommandError::Output)?;
    Ok(EXIT_OK)
}

fn host() -> Place {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    Place {
        device: "host".to_owned(),
        name: format!("{} {}, {cores} cores", std::env::consts::ARCH, std::env::consts::OS),
        free_bytes: host_free_bytes(),
        total_bytes: None,
        unusable: None,
    }
}

#[cfg(not(feature = "cuda"))]
fn cuda() -> Result<Vec<Place>, String> {
    Err("this program was built without the feature `cuda`".to_owned())
}

#[cfg(feature = "cuda")]
fn cuda() -> Result<Vec<Place>, String> {
    use kvpool::cuda::{Device, DeviceInfo, devices};

    let place = |info: DeviceInfo| {
        // What can be seen only by opening it: whether its context can be had, and what is free.
        let free = match &info.unusable {
            Some(error) => Err(error.to_string()),
            None => Device::open(usize::from(info.ordinal))
                .map_err(|error| error.to_string())
                .and_then(|device| device.memory_bytes().map_err(|error| error.to_string())),
        };
        Place {
            device: format!("cuda:{}", info.ordinal),
            name: format!(
                "{}, compute capability {}, {} multiprocessors",
                info.name, info.capability, info.multiprocessors
            ),
            free_bytes: free.as_ref().ok().map(|&(free, _)| free),
            total_bytes: Some(info.memory_bytes),
            unusable: free.err(),
        }
    };
    devices().map(|found| found.into_iter().map(place).collect()).map_err(|error| error.to_string())
}

fn render(info: &Info) -> String {
    let mut table = output::table(UTF8_FULL_CONDENSED);
    table.set_header(COLUMNS);
    let bytes = |bytes: Option<u64>| bytes.map_or(String::new(), |bytes| BinaryBytes(bytes).to_string());
    for place in &info.devices {
        let unusable = place.unusable.as_ref().map_or("no".to_owned(), |reason| format!("yes: {reason}"));
        table.add_row([
            place.device.clone(),
            place.name.clone(),
            bytes(place.free_bytes),
            bytes(place.total_bytes),
            unusable,
        ]);
    }
    match &info.cuda {
        None => table.to_string(),
        Some(reason) => format!("{table}\nno CUDA devices: {reason}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_the_names_of_the_json() {
        let json = serde_json::to_value(host()).unwrap();
        let fields = json.as_object().unwrap().keys();
        let mut fields: Vec<&str> = fields.map(|name| name.trim_end_matches("_bytes")).collect();
        let mut columns = COLUMNS;
        fields.sort_unstable();
        columns.sort_unstable();
        assert_eq!(fields, columns);
    }

    #[test]
    fn why_a_device_cannot_be_used_is_said() {
        let mut old = host();
        old.device = "cuda:3".to_owned();
        old.unusable = Some("too old".to_owned());
        let text = render(&Info { devices: vec![host(), old], cuda: None });
        assert!(text.contains("cuda:3") && text.contains("yes: too old") && text.contains("no "), "{text}");
        let text = render(&Info { devices: vec![host()], cuda: Some("no driver".to_owned()) });
        assert!(text.ends_with("no CUDA devices: no driver"), "{text}");
    }
}
